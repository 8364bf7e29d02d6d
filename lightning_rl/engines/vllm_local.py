"""vLLM in the training process: continuous batching over one stepping loop."""

import asyncio
import atexit
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.arguments import configurable
from lightning_rl.engines.base import (
    Completion,
    Engine,
    Sampling,
    fail,
    require_same_weights,
)
from lightning_rl.engines.vllm_adapter import (
    add_request,
    reload_weights,
    rendezvous_file,
    sampling_params,
    weight_shapes,
)
from lightning_rl.engines.vllm_cpu import (
    keep_global_randomness,
    skip_rank_compilation,
    use_cpu_kernels,
)
from lightning_rl.engines.vllm_process import (
    collect_garbage,
    contained,
    divert_crash_dump,
    last_line,
    shut_down,
)
from lightning_rl.engines.vllm_settings import EngineSettings
from lightning_rl.errors import EngineError, StaleWeightsError

_LONGEST_STEP_S = 10.0
"""That closing waits for; one that hangs must not keep a run from ending."""


@dataclass(slots=True)
class _Request:
    """A request in flight: who waits for it, and which version wrote its tokens so far."""

    future: asyncio.Future[Completion]
    versions: list[int] = field(default_factory=list)


@configurable
class VLLMLocal(Engine):
    """vLLM inside this process, on its device; one per training process.

    Args:
        dtype: of the engine's weights; None: as the trainer computes, so ``bfloat16`` with
            ``precision: bf16-mixed``. In ``float32`` its logprobs equal the trainer's to 1e-5.
        max_model_len: longest prompt plus completion in tokens; None: what the model allows.
        kv_cache_gb: key/value cache in GiB; None: vLLM's own choice from
            ``gpu_memory_utilization`` (on CPU that would be nearly all memory, so 0.25 there).
        gpu_memory_utilization: share of the GPU that vLLM may take.
        max_num_seqs: requests computed together; others wait.
        enable_prefix_caching: share the key/value cache of equal prompt prefixes.
        options: further arguments of ``vllm.EngineArgs``, as they are.
    """

    starting = "vLLM starts"

    def __init__(
        self,
        dtype: str | None = None,
        max_model_len: int | None = None,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.4,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        if find_spec("vllm") is None:
            raise EngineError(
                "VLLMLocal needs vLLM, which is not installed; `pip install lightning_rl[cpu]` (or "
                "[cuda]), or use engine: TransformersEngine"
            )
        self.choose_dtype(dtype)
        self._settings = EngineSettings(
            dtype=self.dtype,
            max_model_len=max_model_len,
            kv_cache_gb=kv_cache_gb,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            options=options or {},
        )
        self.max_model_len = max_model_len
        self.kv_cache_gb = kv_cache_gb
        self._llm: Any = None
        self._device: int | None = None  # the trainer's GPU
        self._shapes: dict[str, torch.Size] = {}
        self._requests: dict[str, _Request] = {}
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
        on_cpu = not torch.cuda.is_available()
        self._device = self._own_device()
        settings = replace(self._settings, dtype=self.dtype)
        arguments = settings.arguments(model_dir, self.trust_remote_code, self._device)
        with contained(self._device):
            from vllm import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine

            if on_cpu:
                skip_rank_compilation()
                keep_global_randomness()
            try:
                # By the context vLLM chooses how many tokens a step takes, where that is not set.
                context = UsageContext.ENGINE_CONTEXT if on_cpu else UsageContext.LLM_CLASS
                self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments), context)
            except (ValueError, RuntimeError, TypeError, AssertionError) as error:
                raise EngineError(f"vLLM did not start: {last_line(error)}") from error
        if on_cpu and arguments["enforce_eager"]:
            self._llm.apply_model(use_cpu_kernels)
        self._crash_file = divert_crash_dump()
        self._detach_process_group()
        for file in filter(None, self._llm.collective_rpc(rendezvous_file)):
            # vLLM leaves it behind. The process's groups outlive the engine, and a new one
            # (Lightning makes some in each run) meets there: without it, that waits half an hour.
            atexit.register(file.unlink, missing_ok=True)
        self._shapes = weight_shapes(model_dir, bool(arguments.get("trust_remote_code")))

    def close(self) -> None:
        if self._llm is None:
            return
        between_steps = self._exclusive.acquire(timeout=_LONGEST_STEP_S)
        requests, self._requests = self._requests, {}
        self.version = -1
        if between_steps:  # else it hangs in one, and must not lose its memory in the middle of it
            with self._on_device():
                shut_down(self._llm)
                self._llm = None
                collect_garbage()
            self._exclusive.release()
        self._llm = None
        task, self._loop_task = self._loop_task, None
        for request in requests.values():
            fail(request.future, "VLLMLocal was closed while it generated")
        if task is not None and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(task.cancel)  # it may be paused

    def _detach_process_group(self) -> None:
        """Deleting the engine must not destroy the process group that Lightning trains with."""
        finalizer = getattr(self._llm.engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()

    def _own_device(self) -> int | None:
        """The GPU of the trainer: Lightning has made it this thread's."""
        return torch.cuda.current_device() if torch.cuda.is_available() else None

    def _on_device(self) -> AbstractContextManager[object]:
        """For calls of vLLM: a thread begins on the first GPU, which may be another rank's."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)

    # ---------------------------------------------------------------- generation

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        loop = asyncio.get_running_loop()
        request_id = str(self._next_id)
        self._next_id += 1
        request = _Request(loop.create_future())
        params = sampling_params(sampling, seed)
        with self._exclusive:
            self.require_ready()  # which it is not in the middle of a push
            self.require_room(len(token_ids), sampling)
            internal_id = add_request(self._llm, request_id, token_ids, params, sampling.priority)
            self._requests[request_id] = request
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = loop.create_task(self._step_while_busy())
        try:
            return await request.future
        except asyncio.CancelledError:
            with self._exclusive:
                if self._requests.pop(request_id, None) is not None and self._llm is not None:
                    self._llm.abort_request([internal_id], internal=True)
            raise

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

    async def _step_while_busy(self) -> None:
        """Advance all requests token by token; new ones join between steps."""
        # A thread takes over torch.set_num_threads() when it first asks torch; vLLM asks OpenMP.
        torch.get_num_threads()
        try:
            while self._requests:
                await self._may_step.wait()
                with self._exclusive, self._on_device():
                    if self._llm is None:
                        return
                    for output in self._llm.step():
                        if output.finished:  # before a push changes the version
                            self._finish(output)
                await asyncio.sleep(0)  # let finished requests' owners, and new requests, in
        except Exception as error:  # whatever vLLM raises must reach those who wait
            requests, self._requests = self._requests, {}
            message = f"vLLM failed while generating: {last_line(error)}"
            if self._crash_file.exists():
                message += f" (what it was computing is in {self._crash_file})"
            for request in requests.values():
                fail(request.future, message, error)

    def _finish(self, output: Any) -> None:
        request = self._requests.pop(output.request_id, None)
        if request is None or request.future.done():
            return
        result = output.outputs[0]
        tokens = list(result.token_ids)
        request.versions += [self.version] * (len(tokens) - len(request.versions))
        request.future.set_result(
            Completion(
                token_ids=tokens,
                logprobs=result.logprobs,
                finish_reason=result.finish_reason or "abort",
                versions=request.versions,
            )
        )

    # ---------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._llm is None:
            raise EngineError("VLLMLocal is not running; call start() first")
        dtype = getattr(torch, self.dtype)
        state = {name: weight.to(dtype) for name, weight in weights}
        # vLLM merges some weights, and does not notice if one of the parts is missing.
        require_same_weights(state, self._shapes, "VLLMLocal")
        with self._exclusive, self._on_device():
            self._leave_version()
            self._llm.collective_rpc(reload_weights, args=(list(state.items()),))
            self._enter_version(version)

    def _leave_version(self) -> None:
        """Before weights change: it holds no version until all have arrived."""
        for request_id, request in self._requests.items():
            self._stamp(request_id, request)
        self.version = -1

    def _enter_version(self, version: int) -> None:
        # Keys and values of old weights would poison every later prompt that shares a prefix.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise StaleWeightsError("vLLM refused to reset its prefix cache after a push")
        self.version = version

    def _stamp(self, request_id: str, request: _Request) -> None:
        """Note which version wrote the tokens that a request in flight has so far."""
        state = self._llm.output_processor.request_states
        internal = self._llm.output_processor.external_req_ids.get(request_id, [request_id])[0]
        done = len(state[internal].detokenizer.output_token_ids) if internal in state else 0
        request.versions += [self.version] * (done - len(request.versions))
