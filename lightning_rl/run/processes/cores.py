"""Threads of each training process, and of an engine in it: their share of the usable cores."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.run.processes.dist import world_size
from lightning_rl.run.processes.machine import usable_cores
from lightning_rl.run.processes.openmp import spin_briefly, why_slow

_GIVEN = os.environ.get("OMP_NUM_THREADS")
"""The value before the run started: Lightning sets the variable, too, when it starts processes."""

_TURN_S = 0.001

T = TypeVar("T")


async def compute(call: Callable[[], T], on_cpu: bool) -> T:
    """Return the result of a model's computation, run in a suitable thread if it is on a CPU.

    While the training thread waits, the call runs in that thread, with this thread's thread count.
    OpenMP keeps a separate team for each thread that computes. As soon as a process has more OpenMP
    threads than there are cores, all of them sleep after every single product (libgomp's throttled
    spin count), and waking them takes longer than small products do: two threads were slower than
    one.

    While the training thread trains, the call runs in a thread beside the event loop; otherwise
    whatever the trainer asks of the loop would wait for a whole decoding step.
    """
    if not on_cpu:
        return call()
    if not runtime.main_calls.is_open:
        return await runtime.in_engine_thread(partial(_plainly, call))
    if torch.get_num_threads() == 1:
        return call()
    return await runtime.in_main_thread(partial(_plainly, call))


def _plainly(call: Callable[[], T]) -> T:
    """Call without the autocast that the trainer may have enabled, and return the result."""
    # A thread takes over torch.set_num_threads() when it first asks torch; vLLM asks OpenMP.
    torch.get_num_threads()
    with torch.autocast("cpu", enabled=False):
        return call()


def share_cores(trainer: Trainer, chosen: int | None = None) -> None:
    """Give each training process on this machine at most its share of the cores as threads.

    Call it before an engine starts in this process, because the engine takes over the thread count.
    Lightning does the same for several processes, but counts cores that a container may not use.
    The user's ``OMP_NUM_THREADS`` is kept, with a warning if it is too high. A script whose waiting
    threads spin for long gets one message about it.

    Args:
        trainer: the run's trainer.
        chosen: a data module's own number of threads, on a CPU; None: the share.
    """
    on_cpu = trainer.strategy.root_device.type == "cpu"
    processes, cores = trainer.num_devices, usable_cores()
    share = max(1, cores // processes)
    if chosen is not None and on_cpu:
        torch.set_num_threads(chosen)
    elif _GIVEN is None and torch.get_num_threads() > share:
        torch.set_num_threads(share)
        os.environ["OMP_NUM_THREADS"] = str(share)  # for what this process starts
    threads = torch.get_num_threads()
    if world_size() > 1:
        each = "1 thread" if threads == 1 else f"{threads} threads"
        rank_zero_info(f"using {processes} processes of {each} each on {cores} cores")
        if on_cpu and processes * threads > cores:
            rank_zero_warn(_too_many(processes, threads, cores))
    if spin_briefly() and on_cpu and threads > 1 and (reason := why_slow()):
        rank_zero_info(reason)


@contextmanager
def switching_often() -> Iterator[None]:
    """Let Python threads take turns every millisecond, not every five.

    Torch gives the interpreter up for each operation. If a thread that computes in Python has taken
    it meanwhile, the training step waits until that thread's turn ends. By
    ``benchmarks.switch_interval``, a second of Python's costs steps of large operations 0.9 seconds
    at 5 ms and 0.7 at 1 ms, and steps of small ones a second at either.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def beside_engine(engine_threads: int | None) -> Iterator[None]:
    """Divide this process's threads between an engine that generates meanwhile and this thread.

    ``engine_threads`` is the engine's share, at most all but one; None: half. If there is only one
    thread, each of them uses one.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    engine = min(engine_threads or threads // 2, threads - 1)

    async def set_engine(count: int) -> None:
        # Of the thread that calls.
        await runtime.in_engine_thread(partial(torch.set_num_threads, count))

    run_async(set_engine(engine))
    torch.set_num_threads(threads - engine)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        run_async(set_engine(threads))


def _too_many(processes: int, threads: int, cores: int) -> str:
    if threads == 1:
        return (
            f"trainer.devices={processes} processes share {cores} cores, and none of them runs "
            f"faster than one alone would; lower it to {cores}"
        )
    return (
        f"trainer.devices={processes} processes of {threads} threads each: "
        f"{processes * threads} threads compete for {cores} cores, which can make them many times "
        f"slower; set OMP_NUM_THREADS={max(1, cores // processes)}"
    )
