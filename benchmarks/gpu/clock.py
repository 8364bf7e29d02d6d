"""Measure milliseconds, bytes and waits of a device that works behind Python's back."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench


def settle(bench: Bench) -> None:
    """Wait until the device has done all that it was given."""
    if bench.device == "cuda":
        torch.cuda.synchronize()


def milliseconds(bench: Bench, work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median milliseconds of some runs after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        settle(bench)
        begin = time.perf_counter()
        work()
        settle(bench)
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times[1:])[repeats // 2]


def device_work(bench: Bench, work: Callable[[], Any]) -> tuple[float, int]:
    """Return the share of ``work``'s wall seconds in which the device computes, and its kernels.

    In the rest of the time the device waits for the host. Kernels that overlap count twice.
    """
    activity = ProfilerActivity.CPU if bench.tiny else ProfilerActivity.CUDA
    settle(bench)
    with profile(activities=[activity]) as profiler:
        begin = time.perf_counter()
        work()
        settle(bench)
        seconds = time.perf_counter() - begin
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(k.self_device_time_total for k in kernels) / 1e6 / seconds, len(kernels)


def give_back(bench: Bench) -> None:
    """Free memory that nothing refers to any more: modules and trainers refer to each other."""
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def begin_peak(bench: Bench) -> None:
    """Start the measurement that :func:`peak_bytes` reads."""
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(bench: Bench) -> int | None:
    """Return the most that torch had allocated at one time; None where it does not count."""
    return torch.cuda.max_memory_allocated() if bench.device == "cuda" else None


def used_bytes(bench: Bench) -> int:
    """Return the bytes in use on the device, by all processes and allocators; 0 on a CPU."""
    if bench.device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def counted_waits(bench: Bench, found: list[str]) -> Iterator[None]:
    """Append to ``found`` a line for each time that Python waits for the device in the block."""
    if bench.device != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [
        f"{w.filename.rpartition('/')[2]}:{w.lineno}"
        for w in caught
        if "synchronizing CUDA operation" in str(w.message)
    ]
