"""TransformersEngine: for tiny models, for machines without vLLM, and for tests."""

import asyncio
import gc
import random
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine, fail
from lightning_rl.engines.hf.adapted_layers import Adapters
from lightning_rl.engines.hf.decoding import Decoder, RoutedDecoder
from lightning_rl.engines.hf.kv_cache import require_cache
from lightning_rl.engines.hf.requests import DecodeRequest
from lightning_rl.engines.lora import LoRAEngine, require_adapters
from lightning_rl.engines.prefix_cache import PrefixCache
from lightning_rl.engines.push import HeldDigests, Push
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, EngineError, require_at_least
from lightning_rl.models.pretrained import Loading, device_of, lm_class
from lightning_rl.models.routing import require_routing
from lightning_rl.models.stacked import FileNames
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Placed
from lightning_rl.run.digest import digests
from lightning_rl.run.processes.cores import compute
from lightning_rl.vision.decoding import SeenOnce
from lightning_rl.vision.reader import PictureReader, reader_of, supported


@configurable
class TransformersEngine(LoRAEngine):
    """Samples with a Hugging Face model, in batches that requests join at any token.

    It needs nothing but transformers. For a tiny model it can be faster than vLLM, whose overhead
    dominates there; use vLLM for large models, long prompts with shared prefixes, stop strings and
    structured outputs. With a vision model, it reads pictures.

    Args:
        dtype: dtype of the engine's own copy of the weights; None: the trainer's.
        max_batch_size: maximum number of requests sampled together.
        device: device of the model; None: a GPU if there is one.
        min_batch_size: number of requests that an idle engine waits for, if they arrive one by one
            (turns of environments and tools); 1: do not wait.
        max_wait_s: maximum seconds of this wait.
        kept_tokens: maximum number of tokens of finished texts whose KV cache is kept until the
            next push. A request that continues such a text (the next turn of a chat) then reads
            only the new tokens. Its logprobs are rounded differently, and depend on what was kept:
            with 0, which keeps nothing, an interrupted run resumes bit by bit.
        adapters: ``apart``: the LoRA stays unmerged, and a push contains it alone; ``merged``: the
            engine computes with merged weights; None: ``apart`` if ``dtype`` has 16 bits.
        routed_experts: record in rollouts which experts each token was routed to, even if the
            trainer does not replay them.
    """

    routed_experts = False
    keeps_skipped_weights = True

    def __init__(
        self,
        dtype: str | None = None,
        max_batch_size: int = 256,
        device: str | None = None,
        min_batch_size: int = 1,
        max_wait_s: float = 0.05,
        kept_tokens: int = 0,
        adapters: str | None = None,
        routed_experts: bool = False,
    ) -> None:
        self.choose_dtype(dtype)
        self.choose_adapters(adapters)
        require_at_least(1, max_batch_size=max_batch_size, min_batch_size=min_batch_size)
        require_at_least(0, max_wait_s=max_wait_s, kept_tokens=kept_tokens)
        if min_batch_size > max_batch_size:
            raise ConfigError(
                f"min_batch_size={min_batch_size} must be <= max_batch_size={max_batch_size}"
            )
        self.max_batch_size = max_batch_size
        self.min_batch_size = min_batch_size
        self.max_wait_s = max_wait_s
        self.kept_tokens = kept_tokens
        self._kept = PrefixCache(kept_tokens) if kept_tokens else None
        self.configure_routing(routed_experts)
        try:
            self.device = device_of(device)
        except RuntimeError as error:
            raise ConfigError(f"engine device={device!r}: {str(error).splitlines()[0]}") from error
        self._lm: PreTrainedModel | None = None
        self._adapters = Adapters()
        self._reader: PictureReader | None = None
        self._tower: SeenOnce | None = None
        # Who waits for which request: to be begun, and of those that are being written.
        self._waiting: dict[DecodeRequest, asyncio.Future[Completion]] = {}
        self._writing: dict[DecodeRequest, asyncio.Future[Completion]] = {}
        self._arrived = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        # Weights are pushed from the trainer's thread, while batches are sampled in another.
        self._exclusive = threading.Lock()

    @property
    def running(self) -> bool:
        return self._lm is not None

    @property
    def max_length(self) -> int:
        assert self._lm is not None
        config = self._lm.config.get_text_config()
        # Where nothing looks back at positions, there are as many as one likes.
        return int(getattr(config, "max_position_embeddings", sys.maxsize))

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._writing)

    def configure_routing(self, wanted: bool) -> None:
        if wanted and self.kept_tokens:
            raise ConfigError(
                f"engine kept_tokens={self.kept_tokens}: the experts of kept texts are not known, "
                "so they cannot be recorded; set kept_tokens: 0"
            )
        self.routed_experts = wanted or self.routed_experts

    def start(self, model_dir: Path) -> None:
        if self._lm is not None:
            return
        self._require_device()
        trust = self.trust_remote_code
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust)
        with torch.random.fork_rng([]):  # building must not advance the run's random state
            lm = lm_class(config).from_config(
                config, dtype=getattr(torch, self.dtype), trust_remote_code=trust
            )
        self._routing = require_routing(lm) if self.routed_experts else None
        require_cache(lm, self.kept_tokens)
        self._lm = lm.to(self.device).eval().requires_grad_(False)
        tokenizer = load_tokenizer(str(model_dir), Loading(trust_remote_code=trust))
        self._ends = end_tokens_of(tokenizer).token_ids
        self._reader = reader_of(tokenizer)
        self._tower = None if self._reader is None else SeenOnce(self._reader.family)
        # As vLLM does: the collector goes through all libraries' objects each time it is due, which
        # takes longer than an iteration of a small model.
        gc.freeze()

    def _require_device(self) -> None:
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"engine device={str(self.device)!r} cannot be used here ({reason}); set an "
                "available device, such as cpu, or leave it out"
            ) from error

    def close(self) -> None:
        if self._lm is not None:
            gc.unfreeze()
        self._lm, self._adapters = None, Adapters()
        self.version, self.has_base = -1, False
        self._forget_texts()

    def sleep(self) -> None:
        with self._exclusive:
            self._forget_texts()

    def _forget_texts(self) -> None:
        """Drop kept texts and encoded pictures, because the weights are about to change."""
        for kept in (self._kept, self._tower):
            if kept is not None:
                kept.clear()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        return await self._write(self, token_ids, sampling, seed)

    async def look(
        self, pictures: Sequence[Placed], token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        return await self._write(self, token_ids, sampling, seed, pictures)

    def require_sight(self) -> None:
        """Accept pictures."""

    async def _write(
        self,
        writer: Engine,
        token_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        pictures: Sequence[Placed] = (),
    ) -> Completion:
        """Like :meth:`look`, with the weights of ``writer``."""
        with self._exclusive:  # during a push it holds no version
            writer.require_ready()
        for name in ("stop", "structured_outputs"):
            if value := getattr(sampling, name):
                raise ConfigError(
                    f"sampling.{name}={value} is not supported by TransformersEngine; use VLLMLocal"
                )
        self.require_room(len(token_ids), sampling)
        loop = asyncio.get_running_loop()
        request = DecodeRequest(writer, list(token_ids), sampling, random.Random(seed))
        if pictures:
            request.pictures = tuple(pictures)
            request.seen = self._required_reader().seen(request.prompt, pictures)
        future = self._waiting[request] = loop.create_future()
        if self._loop_task is None or self._loop_task.done():
            self._arrived = asyncio.Event()  # of this loop
            self._loop_task = loop.create_task(self._serve())
        self._arrived.set()
        return await future

    def _required_reader(self) -> PictureReader:
        if self._reader is None:
            raise ConfigError(
                f"the model of {type(self).__name__} does not read pictures, but a prompt contains "
                f"some; use one of {supported()}"
            )
        return self._reader

    async def _serve(self) -> None:
        """Run step by step until nobody waits; requests join and answers leave between steps."""
        decoder: Decoder | None = None
        while self._waiting or self._writing:
            if self._writing:
                await asyncio.sleep(0)
            else:
                await self._gather()
            try:
                advance = partial(self._advance, decoder)
                decoder, over = await compute(advance, self.device.type == "cpu")
            except Exception as error:  # must reach those who wait
                for future in [*self._writing.values(), *self._waiting.values()]:
                    fail(future, f"transformers failed while generating: {error}", error)
                self._writing, self._waiting, decoder = {}, {}, None
                continue
            for request in over:
                self._writing.pop(request).set_result(request.completion())

    def _advance(self, decoder: Decoder | None) -> tuple[Decoder, list[DecodeRequest]]:
        """Run :meth:`_step` unless weights are being pushed; the first call creates the decoder."""
        with self._exclusive:
            if self._lm is None:
                raise EngineError("the engine was closed")
            next_up = islice(self._waiting, self.max_batch_size)  # of what may be 800,000
            for writer in {request.writer for request in (*self._writing, *next_up)}:
                writer.require_ready()  # a push may have failed
            decoder = decoder or self._decoder(self._lm)
            return decoder, self._step(decoder)

    def _decoder(self, lm: PreTrainedModel) -> Decoder:
        if self._routing is not None:
            return RoutedDecoder(lm, self._ends, self._adapters, self._routing)
        return Decoder(lm, self._ends, self._kept, self._tower, self._adapters)

    def _step(self, decoder: Decoder) -> list[DecodeRequest]:
        """Sample one token for each request, new ones included; return those that ended."""
        for request, future in list(self._writing.items()):
            if future.done():  # nobody waits for it any more
                request.reason = "abort"
                self._cancelled_tokens += len(request.tokens)
                del self._writing[request]
        joining = []
        for request in list(islice(self._waiting, self.max_batch_size - len(self._writing))):
            future = self._waiting.pop(request)
            if not future.done():
                self._writing[request] = future
                joining.append(request)
        decoder.reread()
        if joining:
            decoder.join(joining)
        return decoder.step() if self._writing else []

    async def _gather(self) -> None:
        """Wait until the batch is large enough, or ``max_wait_s`` is over."""
        await asyncio.sleep(0)  # let everyone who is ready join the batch
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.max_wait_s
        while len(self._waiting) < self.min_batch_size and clock() < deadline:
            self._arrived.clear()
            with suppress(TimeoutError):  # then the batch is as large as it gets
                await asyncio.wait_for(self._arrived.wait(), deadline - clock())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._load(self, weights, version)

    def _load(self, writer: Engine, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Like :meth:`load_weights`, for ``writer``."""
        if self._lm is None:
            raise EngineError(f"{type(self).__name__} is not running; call start() first")
        with self._exclusive:
            writer.version = -1
            self._forget_texts()
            if writer.takes_adapters:
                self._take_adapters(self._lm, writer, weights)
            else:
                self._take(self._lm, weights)
            writer.version = version

    def _take_adapters(
        self, lm: PreTrainedModel, writer: Engine, weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Load a writer's adapters, and their base if it is pushed; else whole weights."""
        adapters, base = self.divided(weights)
        shapes = {name: weight.shape for name, weight in _held(lm).items()}
        require_adapters(adapters, shapes, type(self).__name__)
        if base is not None:
            self._take(lm, base)
            self.has_base = bool(adapters)
        self._adapters.put(lm, writer, adapters)

    def _take(self, lm: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        held = _held(lm)
        shapes = {name: weight.shape for name, weight in held.items()}
        for name, weight in Push.of(weights).checked(shapes):  # one at a time, so no copy of all
            held[name].copy_(weight)

    def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        if self._lm is None:
            return []
        held = _held(self._lm) | self._adapters.held(self)
        return [HeldDigests(type(self).__name__, self._digests_of(held, names))]

    def _digests_of(self, held: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, str]:
        dtype = getattr(torch, self.dtype)
        return digests((name, held[name].to(dtype)) for name in names if name in held)


def _held(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's own weights, by their names in a push."""
    return dict(FileNames(lm).each(lm.state_dict().items()))
