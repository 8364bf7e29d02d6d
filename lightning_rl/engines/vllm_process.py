"""vLLM as a guest in the trainer's process: what it changes is put back, and its memory freed."""

import gc
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_rl.engines.server_process import validation_failure

_log = logging.getLogger(__name__)


@contextmanager
def contained(device: int | None) -> Iterator[None]:
    """Undo what importing and starting vLLM does to the process around it.

    ``device`` is the GPU that both work on; None: this process uses none.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    set_threads, threads, hook = torch.set_num_threads, torch.get_num_threads(), sys.excepthook
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for restore in (*_random_states(device), *_precisions(), *_devices(device)):
            undo.callback(restore)
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            sys.excepthook = hook


Restore = Callable[[], object]


def _random_states(device: int | None) -> Iterator[Restore]:
    """vLLM seeds all of them, those of all GPUs too."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield lambda: random.setstate(python)
    yield lambda: np.random.set_state(of_numpy)
    yield lambda: torch.set_rng_state(of_torch)
    if device is not None:
        of_cuda = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(of_cuda)


def _precisions() -> Iterator[Restore]:
    """vLLM sets ``highest`` for the trainer, too; for batch invariance all of them."""
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
    """vLLM makes the one that it chooses this thread's."""
    if device is not None:
        yield lambda: torch.cuda.set_device(device)


def shut_down(llm: Any) -> None:
    """End an engine that works in this process, so that its memory is free once it is dropped.

    vLLM's own end would destroy the process group that Lightning trains with, so that has been
    detached; this is the rest of it.
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
    """Empty what vLLM notes of each layer for the next push.

    After one, the notes of attention layers hold these layers, and so their cache, for ever.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        get_layerwise_info(layer).restore_metadata = ({}, {})


def collect_garbage() -> None:
    """Give memory back, once nothing refers to an engine any more: it is full of cycles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def divert_crash_dump() -> Path:
    """The file to which vLLM from now on writes what it was computing when it failed.

    Else these thousands of characters go to the terminal, before the line that says what happened.
    To be called once an engine is there: to start one sets up vLLM's logging anew.
    """
    file = Path(tempfile.gettempdir()) / f"vllm_crash_{os.getpid()}.log"
    logger = logging.getLogger("vllm.logging_utils.dump_input")
    if logger.propagate:
        logger.propagate = False
        logger.addHandler(logging.FileHandler(file, delay=True, encoding="utf-8"))
    return file


def last_line(error: BaseException) -> str:
    """The line of an error's text that says what is wrong: pydantic adds some."""
    lines = str(error).strip().splitlines()
    return validation_failure(str(error)) or (lines[-1] if lines else repr(error))
