"""Threads of each training process, and of an engine in it: shares of the cores that there are."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.run.dist import world_size
from lightning_rl.run.loop import run_async, runtime
from lightning_rl.run.machine import usable_cores
from lightning_rl.run.openmp import spin_briefly, why_slow

_GIVEN = os.environ.get("OMP_NUM_THREADS")
"""As it was before the run: Lightning sets it, too, when it starts processes."""

T = TypeVar("T")


async def compute(call: Callable[[], T], on_cpu: bool) -> T:
    """The result of what a model computes with this process's threads, if it does so on a CPU.

    Then in the thread that trains, if that waits meanwhile, with the thread count of this one.
    OpenMP has threads of their own for each thread that computes. As soon as a process has more of
    them than there are cores, all fall asleep behind every single product (libgomp's throttled spin
    count), and waking them takes longer than small products do: two threads were slower than one.

    If that trains meanwhile, in a thread beside the loop: else whatever the trainer asks the loop
    for would wait for a whole step.
    """
    if not on_cpu:
        return call()
    if not runtime.main_calls.is_open:
        return await runtime.in_engine_thread(partial(_plainly, call))
    if torch.get_num_threads() == 1:
        return call()
    return await runtime.in_main_thread(partial(_plainly, call))


def _plainly(call: Callable[[], T]) -> T:
    """Without the autocast that the trainer may have asked for the results under."""
    # A thread takes over torch.set_num_threads() when it first asks torch; vLLM asks OpenMP.
    torch.get_num_threads()
    with torch.autocast("cpu", enabled=False):
        return call()


def share_cores(trainer: Trainer, chosen: int | None = None) -> None:
    """Give each training process on this machine at most its share of the cores as threads.

    Call it before an engine starts in this process, which takes over as many. Lightning does the
    same for several processes, but counts cores that a container may not use. What the user chose
    with ``OMP_NUM_THREADS`` stays, and a warning says if it is too much. A script whose threads
    spin for long where they wait is told so, once.

    Args:
        trainer: of the run.
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
        rank_zero_info(f"{processes} processes of {_threads(threads)} each, on {cores} cores")
        if on_cpu and processes * threads > cores:
            rank_zero_warn(_too_many(processes, threads, cores))
    if spin_briefly() and on_cpu and threads > 1 and (told := why_slow()):
        rank_zero_info(told)


@contextmanager
def beside_engine(engine_threads: int | None) -> Iterator[None]:
    """Divide this process's threads between an engine that generates meanwhile and this thread.

    ``engine_threads``: the engine's share, at most all but one; None: half. One thread stays one
    for each of them.
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
            f"trainer.devices={processes} processes share {cores} cores, and none is faster than "
            f"alone; lower it to {cores}"
        )
    return (
        f"{threads} threads in each of trainer.devices={processes} processes: "
        f"{processes * threads} threads share {cores} cores and wait for each other, which can be "
        f"many times slower; set OMP_NUM_THREADS={max(1, cores // processes)}"
    )


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
