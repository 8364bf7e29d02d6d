"""Plain transformers as an engine: the reference in parity tests, the fallback without vLLM."""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine, checked, fail
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, EngineError, require_at_least
from lightning_rl.models.sampling import end_tokens


@dataclass(slots=True)
class _Request:
    token_ids: list[int]
    sampling: Sampling
    generator: torch.Generator
    future: asyncio.Future[Completion]


@configurable
class TransformersEngine(Engine):
    """Samples with a Hugging Face model, batch by batch; slower than vLLM on most loads.

    Args:
        dtype: of the engine's own copy of the weights; None: as the trainer computes.
        max_batch_size: requests sampled together.
        device: None: a GPU if there is one.
        min_batch_size: requests that a batch waits for, where they trickle in one by one (turns of
            environments and tools); 1 waits for none.
        max_wait_s: how long at most, in seconds.
    """

    def __init__(
        self,
        dtype: str | None = None,
        max_batch_size: int = 256,
        device: str | None = None,
        min_batch_size: int = 1,
        max_wait_s: float = 0.05,
    ) -> None:
        self.choose_dtype(dtype)
        require_at_least(1, max_batch_size=max_batch_size, min_batch_size=min_batch_size)
        require_at_least(0, max_wait_s=max_wait_s)
        if min_batch_size > max_batch_size:
            raise ConfigError(
                f"min_batch_size={min_batch_size} must be <= max_batch_size={max_batch_size}"
            )
        self.max_batch_size = max_batch_size
        self.min_batch_size = min_batch_size
        self.max_wait_s = max_wait_s
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ConfigError(f"engine device={device!r}: {str(error).splitlines()[0]}") from error
        self._lm: PreTrainedModel | None = None
        self._waiting: list[_Request] = []
        self._sampling = 0  # requests in the present batch
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
        return int(self._lm.config.get_text_config().max_position_embeddings)

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + self._sampling

    def start(self, model_dir: Path) -> None:
        if self._lm is not None:
            return
        trust = self.trust_remote_code
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust)
        with torch.random.fork_rng([]):  # building must not advance the run's random state
            lm = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.dtype), trust_remote_code=trust
            )
        self._lm = lm.to(self.device).eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust)
        self._ends = end_tokens(tokenizer, config)

    def close(self) -> None:
        self._lm = None
        self.version = -1

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        self.require_ready()
        for name in ("stop", "structured_outputs"):
            if value := getattr(sampling, name):
                raise ConfigError(
                    f"sampling.{name}={value} is not supported by TransformersEngine; use VLLMLocal"
                )
        self.require_room(len(token_ids), sampling)
        loop = asyncio.get_running_loop()
        generator = torch.Generator(self.device).manual_seed(seed)
        request = _Request(list(token_ids), sampling, generator, loop.create_future())
        self._waiting.append(request)
        if self._loop_task is None or self._loop_task.done():
            self._arrived = asyncio.Event()  # of this loop
            self._loop_task = loop.create_task(self._serve())
        self._arrived.set()
        return await request.future

    async def _serve(self) -> None:
        while self._waiting:
            await self._gather()
            batch = self._waiting[: self.max_batch_size]
            del self._waiting[: self.max_batch_size]
            batch = [request for request in batch if not request.future.done()]
            self._sampling = len(batch)
            try:
                with self._exclusive:
                    if self._lm is None:
                        raise EngineError("the engine was closed")
                    completions = self._sample(self._lm, batch)
            except Exception as error:  # must reach those who wait
                for request in batch:
                    fail(request.future, f"transformers failed while generating: {error}", error)
                continue
            finally:
                self._sampling = 0
            for request, completion in zip(batch, completions, strict=True):
                request.future.set_result(completion)

    async def _gather(self) -> None:
        """Until the batch is large enough, or its first request has waited for long enough."""
        await asyncio.sleep(0)  # let everyone who is ready join the batch
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.max_wait_s
        while len(self._waiting) < self.min_batch_size and clock() < deadline:
            self._arrived.clear()
            with suppress(TimeoutError):  # then the batch is as large as it gets
                await asyncio.wait_for(self._arrived.wait(), deadline - clock())

    @torch.no_grad()
    def _sample(self, lm: PreTrainedModel, requests: list[_Request]) -> list[Completion]:
        """Left-pad the prompts, then sample token by token with a key/value cache."""
        width = max(len(r.token_ids) for r in requests)
        count, padding = len(requests), self._ends[0]
        ids = torch.full((count, width), padding, device=self.device)
        mask = torch.zeros((count, width), dtype=torch.long, device=self.device)
        for row, request in enumerate(requests):
            ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons: list[str | None] = [None] * count
        cache = None
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while None in reasons:
            output = lm(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logits = output.logits[:, -1].float()
            chosen = [padding] * count
            for row, request in enumerate(requests):
                if reasons[row] is not None:
                    continue
                token, logprob = _draw(logits[row], request, tokens[row], self._ends)
                chosen[row] = token
                tokens[row].append(token)
                logprobs[row].append(logprob)
                if token in self._ends:
                    reasons[row] = "stop"
                elif len(tokens[row]) == request.sampling.max_tokens:
                    reasons[row] = "length"
            ids = torch.tensor(chosen, device=self.device)[:, None]
            mask = torch.cat([mask, mask.new_ones((count, 1))], 1)
            positions = positions[:, -1:] + 1
        return [
            Completion(
                tokens[row], logprobs[row], str(reasons[row]), [self.version] * len(tokens[row])
            )
            for row in range(count)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._lm is None:
            raise EngineError("TransformersEngine is not running; call start() first")
        held = self._lm.state_dict()
        shapes = {name: weight.shape for name, weight in held.items()}
        with self._exclusive:
            self.version = -1
            for name, weight in checked(weights, shapes):  # one at a time, so no copy of all
                held[name].copy_(weight)
            self.version = version


def _draw(
    logits: Tensor, request: _Request, written: list[int], ends: list[int]
) -> tuple[int, float]:
    """One token and its logprob under the distribution it was sampled from; logits (V,)."""
    sampling = request.sampling
    if len(written) < sampling.min_tokens:
        logits = logits.clone()
        logits[ends] = -torch.inf
    if sampling.penalizes:
        logits = _penalized(logits, sampling, request.token_ids, written)
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        token = int(logits.argmax())
        return token, float(logprobs[token])
    logprobs = _filtered(logits / sampling.temperature, sampling).log_softmax(-1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=request.generator))
    return token, float(logprobs[token])


def _penalized(logits: Tensor, sampling: Sampling, prompt: list[int], written: list[int]) -> Tensor:
    """Logits (V,) with those changed that stand in the prompt or were written, as vLLM does."""
    logits = logits.clone()
    seen = torch.tensor([*prompt, *written], device=logits.device).unique()
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.tensor(written, device=logits.device, dtype=torch.long).bincount(
        minlength=len(logits)
    )
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with all but min-p's, the top-k and the top-p nucleus removed."""
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.max(), -torch.inf)
    if sampling.top_k > 0 and sampling.top_k < len(logits):
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        # Keep tokens until the mass before them reaches top_p, so always the likeliest one.
        outside = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.clone()
        logits[order[outside]] = -torch.inf
    return logits
