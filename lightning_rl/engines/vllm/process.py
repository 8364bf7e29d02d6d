"""vLLM in the trainer's process: restores what it changes, and frees its memory."""

import atexit
import gc
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_rl.engines.replicas.server_process import validation_failure
from lightning_rl.engines.start_hints import with_hint
from lightning_rl.engines.vllm.classes import transformers_unchanged
from lightning_rl.engines.vllm.cpu import (
    keep_global_randomness,
    pack_pushed_experts,
    skip_rank_compilation,
    use_cpu_kernels,
)
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.run.garbage_collection import uncollected

_log = logging.getLogger(__name__)


@contextmanager
def contained(device: int | None) -> Iterator[None]:
    """Undo the side effects of importing and starting vLLM on this process.

    ``device`` is the GPU that both use; None: this process uses none.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    set_threads, threads, hook = torch.set_num_threads, torch.get_num_threads(), sys.excepthook
    triton = logging.getLogger("torch._library.triton")  # on CPUs there is none, nor a need of it
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undo.callback(triton.setLevel, triton.level)
        triton.setLevel(logging.ERROR)
        for restore in (*_random_states(device), *_precisions(), *_devices(device)):
            undo.callback(restore)
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            sys.excepthook = hook


def use_batch_invariance() -> None:
    """Switch on batch invariance for this process.

    Raises:
        ConfigError: if vLLM or a GPU is already in use, since both read the setting at their start.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        return
    if "vllm" in sys.modules or torch.cuda.is_initialized():
        used = "vLLM is imported" if "vllm" in sys.modules else "the GPU is in use"
        raise ConfigError(
            f"batch_invariant=true comes too late, since {used} already; create the engine first "
            "in the process, or start it with VLLM_BATCH_INVARIANT=1"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


Restore = Callable[[], object]


def _random_states(device: int | None) -> Iterator[Restore]:
    """Restore all random states, including those of all GPUs, which vLLM seeds."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield lambda: random.setstate(python)
    yield lambda: np.random.set_state(of_numpy)
    yield lambda: torch.set_rng_state(of_torch)
    if device is not None:
        of_cuda = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(of_cuda)


def _precisions() -> Iterator[Restore]:
    """Restore float32 precisions, which vLLM sets to ``highest``, or all for batch invariance."""
    backends: Any = torch.backends
    for kind in (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv,
                 backends.cudnn.rnn):  # fmt: skip
        yield _setting(kind, "fp32_precision")
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        split_k = getattr(backends.cuda.matmul, f"{name}_split_k")
        yield _setting(backends.cuda.matmul, name, split_k)
    # The last is called first: it writes to those above.
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # one of those above was set alone, and this one cannot be asked for
        return
    yield lambda: torch.set_float32_matmul_precision(precision)


def _setting(place: Any, name: str, *others: Any) -> Restore:
    value = getattr(place, name)
    return lambda: setattr(place, name, (value, *others) if others else value)


def _devices(device: int | None) -> Iterator[Restore]:
    """Restore this thread's current GPU, which vLLM changes."""
    if device is not None:
        yield lambda: torch.cuda.set_device(device)


def started(arguments: Mapping[str, Any], variables: Mapping[str, str], device: int | None) -> Any:
    """Start a vLLM engine in this process, which is otherwise unchanged.

    Raises:
        EngineError: saying why, if vLLM does not start.
    """
    on_cpu = not torch.cuda.is_available()
    grouped = torch.distributed.is_initialized()
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    with contained(device), uncollected():
        from vllm import EngineArgs, envs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if on_cpu:
            skip_rank_compilation()
            keep_global_randomness()
            pack_pushed_experts()
        if device:
            os.environ["VLLM_CACHE_ROOT"] = _cache_of(device, envs.VLLM_CACHE_ROOT)
        # By the context vLLM chooses how many tokens a step takes, where that is not set.
        context = UsageContext.ENGINE_CONTEXT if on_cpu else UsageContext.LLM_CLASS
        try:
            with transformers_unchanged():
                llm: Any = LLMEngine.from_engine_args(EngineArgs(**arguments), context)
        except (ValueError, RuntimeError, TypeError, AssertionError) as error:
            raise EngineError(f"vLLM did not start: {with_hint(last_line(error))}") from error
    if on_cpu and arguments["enforce_eager"]:
        llm.apply_model(use_cpu_kernels)
    finalizer = getattr(llm.engine_core, "_finalizer", None)
    if finalizer is not None:  # it would destroy the process group that Lightning trains with
        finalizer.detach()
    for file in filter(None, llm.collective_rpc(_rendezvous_file)):
        # vLLM leaves it behind. The process's groups outlive the engine, and a new one
        # (Lightning makes some in each run) meets there: without it, that waits half an hour.
        atexit.register(file.unlink, missing_ok=True)
    if device is not None and not grouped:  # NCCL complains of a group that is left to the end
        atexit.register(_destroy_group)
    return llm


def _destroy_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _cache_of(device: int, root: str) -> str:
    """Return the directory for vLLM's compiled code on a GPU that is not the first.

    Compiled code is specific to a GPU, but vLLM stores it by an engine's rank, which is 0 in each
    training process; so code for one GPU would be loaded on another.
    """
    folder = f"device_{device}"
    return root if Path(root).name == folder else str(Path(root) / folder)


def _rendezvous_file(worker: Any) -> Path | None:
    """Return, in vLLM's worker, the file where its process group met; None if it was not a file."""
    scheme, _, path = str(worker.distributed_init_method).partition("://")
    return Path(path) if scheme == "file" else None


def shut_down(llm: Any) -> None:
    """End an engine in this process, so that its memory is free once it is dropped.

    vLLM's own shutdown would destroy the process group that Lightning trains with, so it has been
    detached; this does the rest of it.
    """
    core = llm.engine_core.engine_core
    worker = getattr(core.model_executor, "driver_worker", None)  # None: in other processes
    model = None if worker is None else worker.get_model()
    core.structured_output_manager.clear_backend()
    try:
        core.model_executor.shutdown()
    except RuntimeError as error:  # a GPU that failed in the run fails here, too
        _log.warning("vLLM could not free all of its memory: %s", last_line(error))
    core.scheduler.shutdown()
    if model is not None:
        _forget_reloads(model)
    gc.unfreeze()  # vLLM froze all that there was when it started, itself included


def _forget_reloads(model: torch.nn.Module) -> None:
    """Clear vLLM's notes about each layer for the next push.

    After a push, the notes of attention layers reference these layers, and so their cache, forever.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        get_layerwise_info(layer).restore_metadata = ({}, {})


def collect_garbage() -> None:
    """Free the memory of a dropped engine, which is full of reference cycles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def divert_crash_dump() -> Path:
    """Divert vLLM's dump of a failing step to a file, and return that file.

    Otherwise these thousands of characters appear on the terminal before the actual error. Call it
    after an engine has started, since that resets vLLM's logging.
    """
    file = Path(tempfile.gettempdir()) / f"vllm_crash_{os.getpid()}.log"
    logger = logging.getLogger("vllm.logging_utils.dump_input")
    if logger.propagate:
        logger.propagate = False
        logger.addHandler(logging.FileHandler(file, delay=True, encoding="utf-8"))
    return file


def last_line(error: BaseException) -> str:
    """Return the line of an error's text that says what is wrong; pydantic adds further lines."""
    lines = str(error).strip().splitlines()
    return validation_failure(str(error)) or (lines[-1] if lines else repr(error))
