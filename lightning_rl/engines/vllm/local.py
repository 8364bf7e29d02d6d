"""VLLMLocal: vLLM in the training process, with continuous batching."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine, fail
from lightning_rl.engines.lora import require_adapters
from lightning_rl.engines.push import HeldDigests, Push
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm.forms import (
    InFlightRequest,
    add_request,
    reload_weights,
    sampling_params,
    tokens_so_far,
    weight_shapes,
)
from lightning_rl.engines.vllm.held_digests import held_weights, watch_worker
from lightning_rl.engines.vllm.lora import keep_apart, put_policy
from lightning_rl.engines.vllm.process import (
    collect_garbage,
    divert_crash_dump,
    last_line,
    shut_down,
    started,
    use_batch_invariance,
)
from lightning_rl.engines.vllm.settings import VLLMEngine
from lightning_rl.errors import ConfigError, EngineError, StaleWeightsError
from lightning_rl.run.processes.cores import compute

_LONGEST_STEP_S = 10.0
"""Maximum seconds for which closing waits for a step, so that a hanging one cannot block the run's
end.
"""


@configurable
class VLLMLocal(VLLMEngine):
    """vLLM inside this process, on its device; one engine per training process.

    Its further settings are those of :class:`VLLMEngine`.

    Args:
        dtype: dtype of the engine's weights; None: the trainer's, so ``bfloat16`` with
            ``precision: bf16-mixed``, and always ``bfloat16`` on GPUs. In ``float32`` its logprobs
            equal those of a trainer in float32 to 1e-5; this is slow on a GPU.
        gpu_memory_utilization: share of the GPU's memory that vLLM may use.
        sleep_level: memory that the engine frees while the trainer trains on the same GPU: 1, its
            KV cache, and its weights, which move to host memory; 2, both are discarded until the
            next push, which every iteration must have; None: none.

    Raises:
        ConfigError: for a value out of range, or one that these devices do not support.
        EngineError: without vLLM.
    """

    starting = "vLLM starts"
    _shares_process = True
    """True if the trainer also runs in this process."""

    def __init__(
        self,
        dtype: str | None = None,
        *,
        gpu_memory_utilization: float = 0.4,
        sleep_level: int | None = None,
        **shared: Any,
    ) -> None:
        if find_spec("vllm") is None:
            raise EngineError(
                "VLLMLocal needs vLLM, which is not installed; see Install in the README, or use "
                "engine: TransformersEngine"
            )
        super().__init__(dtype=dtype, gpu_memory_utilization=gpu_memory_utilization, **shared)
        settings = self._settings
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            # Ranks' engines would have to compute the same requests, but each has its own.
            if self._shares_process and settings.options.get(name, 1) != 1:
                raise ConfigError(
                    f"engine options {name}={settings.options[name]}: VLLMLocal uses only the "
                    "device of its training process; use VLLMServer or RayEngine with "
                    "tensor_parallel_size"
                )
        if sleep_level not in (None, 1, 2):
            raise ConfigError(f"engine sleep_level={sleep_level} must be 1, 2 or null")
        if sleep_level is not None:
            settings.options["enable_sleep_mode"] = True
        if settings.batch_invariant and torch.cuda.is_available():
            use_batch_invariance()
        self.sleep_level = sleep_level
        self.kv_cache_gb = settings.kv_cache_gb
        self._llm: Any = None
        self._device: int | None = None  # the trainer's GPU
        self._asleep: set[str] = set()  # of what vLLM calls weights and kv_cache
        self._shapes: dict[str, torch.Size] = {}
        self._requests: dict[str, InFlightRequest] = {}
        self._next_id = 0
        self._loop_task: asyncio.Task[None] | None = None
        # Weights are pushed from the trainer's thread, while requests come from the event loop's.
        self._exclusive = threading.RLock()
        self._may_step = asyncio.Event()
        self._may_step.set()

    # ---------------------------------------------------------------- life

    @property
    def running(self) -> bool:
        return self._llm is not None

    @property
    def max_length(self) -> int:
        return int(self._llm.vllm_config.model_config.max_model_len)

    def start(self, model_dir: Path) -> None:
        if self._llm is not None:
            return
        self._device = self._own_device()
        if self._device is None and self.sleep_level is not None:
            raise ConfigError(
                f"engine sleep_level={self.sleep_level} is not supported on CPUs, where vLLM "
                "cannot free memory; leave it out"
            )
        settings = self.settings
        if self._device is not None and settings.batch_invariant and self._shares_process:
            major, minor = torch.cuda.get_device_capability(self._device)
            if major == 8:  # for the whole process vLLM replaces aten::linear, without a gradient
                raise ConfigError(
                    f"batch_invariant=true on a GPU of compute capability {major}.{minor} removes "
                    "the gradient of all linear layers in vLLM's process; use VLLMServer with "
                    "batch_invariant=true"
                )
        arguments = settings.arguments(model_dir, self.trust_remote_code, self._device)
        self._llm = started(arguments, settings.environment(), self._device)
        self._crash_file = divert_crash_dump()
        if self._shares_process:  # else the worker does so when it is connected
            self._llm.collective_rpc(watch_worker)
        self._shapes = weight_shapes(model_dir, bool(arguments.get("trust_remote_code")))
        if self.takes_adapters:
            self._llm.collective_rpc(keep_apart)

    def configure_routing(self, wanted: bool) -> None:
        if not wanted or self.running:
            return
        if self._own_device() is None:
            raise ConfigError(
                f"engine={type(self).__name__} reports which experts it routed tokens to only on a "
                "GPU (vLLM 0.32 needs its model runner V2, and that Triton), so they cannot be "
                "replayed here; use TransformersEngine, or routing_replay: OldRouting"
            )
        options = self._settings.options | {"enable_return_routed_experts": True}
        self._settings = replace(self._settings, options=options)

    def close(self) -> None:
        if self._llm is None:
            return
        between_steps = self._exclusive.acquire(timeout=_LONGEST_STEP_S)
        requests, self._requests = self._requests, {}
        self.version, self.has_base = -1, False
        if between_steps:  # else it hangs in one, and must not lose its memory in the middle of it
            with self._on_device():
                shut_down(self._llm)
                self._llm = None
                collect_garbage()
            self._exclusive.release()
        self._llm = None
        task, self._loop_task = self._loop_task, None
        for request in requests.values():
            fail(request.future, "VLLMLocal was closed while generating")
        if task is not None and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(task.cancel)  # it may be paused

    def _own_device(self) -> int | None:
        """Return the trainer's GPU, which Lightning has made this thread's current device."""
        return torch.cuda.current_device() if torch.cuda.is_available() else None

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context for calls of vLLM, since a new thread starts on the first GPU, not this
        rank's.
        """
        return nullcontext() if self._device is None else torch.cuda.device(self._device)

    # ---------------------------------------------------------------- generation

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        return await self._write(self, token_ids, sampling, seed)

    async def _write(
        self, writer: Engine, token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        """Like :meth:`generate`, with the weights of ``writer``."""
        loop = asyncio.get_running_loop()
        request_id = str(self._next_id)
        self._next_id += 1
        request = InFlightRequest(loop.create_future(), writer)
        params = sampling_params(sampling, seed)
        with self._exclusive:
            writer.require_ready()  # which it is not in the middle of a push
            self.require_room(len(token_ids), sampling)
            self._wake("weights", "kv_cache")
            adapter = self._adapter_of(writer)
            internal_id = add_request(
                self._llm, request_id, token_ids, params, sampling.priority, adapter
            )
            self._requests[request_id] = request
        if self._loop_task is None or self._loop_task.done():
            paused, self._may_step = self.paused, asyncio.Event()  # of this event loop
            if not paused:
                self._may_step.set()
            self._loop_task = loop.create_task(self._step_while_busy())
        try:
            return await request.future
        except asyncio.CancelledError:
            with self._exclusive:
                if self._requests.pop(request_id, None) is not None and self._llm is not None:
                    self._cancelled_tokens += tokens_so_far(self._llm, request_id)
                    self._llm.abort_request([internal_id], internal=True)
            raise

    def _adapter_of(self, writer: Engine) -> Any:
        """Return the ``LoRARequest`` for the writer's weights in vLLM; None: the plain model."""
        return None

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def paused(self) -> bool:
        return not self._may_step.is_set()

    async def pause(self) -> None:
        self._may_step.clear()

    async def resume(self) -> None:
        self._may_step.set()

    def sleep(self) -> None:
        if self.sleep_level is None or self._llm is None or self._asleep:
            return
        with self._exclusive, self._on_device():
            if self._requests:
                raise EngineError(
                    f"VLLMLocal cannot sleep while it generates for {self.in_flight} requests; "
                    "with sleep_level use a collector that waits for the whole batch: SyncCollector"
                )
            self._llm.sleep(self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            if self.sleep_level == 2:
                self.version = -1

    def _wake(self, *parts: str) -> None:
        due = [part for part in parts if part in self._asleep]
        if due:
            with self._on_device():
                torch.cuda.empty_cache()  # what an update has had, torch keeps for the next one
                self._llm.wake_up(due)
            self._asleep -= set(due)

    async def _step_while_busy(self) -> None:
        """Advance all requests token by token; new ones join between steps."""
        try:
            while self._requests:
                await self._may_step.wait()
                for request, output in await compute(self._step, self._device is None):
                    request.finish(output)
                await asyncio.sleep(0)  # let finished requests' owners, and new requests, in
        except Exception as error:  # whatever vLLM raises must reach those who wait
            requests, self._requests = self._requests, {}
            message = f"vLLM failed while generating: {last_line(error)}"
            if self._crash_file.exists():
                message += f" (details of the failing step are in {self._crash_file})"
            for request in requests.values():
                fail(request.future, message, error)

    def _step(self) -> list[tuple[InFlightRequest, Any]]:
        """Advance all requests; return those that are finished, with their outputs."""
        over = []
        with self._exclusive, self._on_device():
            for output in self._llm.step() if self._llm is not None else ():
                if output.finished and output.request_id in self._requests:
                    request = self._requests.pop(output.request_id)
                    # Now, before a push changes the version.
                    request.stamp(len(output.outputs[0].token_ids))
                    over.append((request, output))
        return over

    # ---------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._llm is None:
            raise EngineError("VLLMLocal is not running; call start() first")
        with self._exclusive, self._on_device():
            self._wake("weights")  # the cache may stay asleep: what a push needs fits in its place
            self._begin_update(self)
            self._load(weights)
            self._end_update(version)

    def _begin_update(self, writer: Engine) -> None:
        """Invalidate a writer's version until all of its new weights have arrived."""
        for request_id, request in self._requests.items():
            if request.writer is writer:
                request.stamp(tokens_so_far(self._llm, request_id))
        writer.version = -1

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if not self.takes_adapters:
            self._reload(weights)
            return
        adapters, base = self.divided(weights)
        require_adapters(adapters, self._shapes)
        if base is not None:
            self._reload(base)
            self.has_base = bool(adapters)  # else a LoRA is merged into what came
        self._llm.collective_rpc(put_policy, args=(adapters,))

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        dtype = getattr(torch, self.dtype)
        # One at a time, as vLLM takes them, which merges some and does not notice a missing part.
        checked = Push.of(weights).checked(self._shapes)
        stream = ((name, weight.to(dtype)) for name, weight in checked)
        self._llm.collective_rpc(reload_weights, args=(stream,))

    def _end_update(self, version: int) -> None:
        # Keys and values of old weights would poison every later prompt that shares a prefix.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise StaleWeightsError("vLLM refused to reset its prefix cache after a push")
        self.version = version

    def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        if self._llm is None:
            return []
        return [HeldDigests(type(self).__name__, **self._ask_worker(held_weights, names))]

    def _ask_worker(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of a function in vLLM's worker about the weights, which are woken for
        it.
        """
        with self._exclusive, self._on_device():
            self._wake("weights")
            [answer] = self._llm.collective_rpc(question, args=arguments)
        return answer
