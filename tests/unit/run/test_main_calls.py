"""Test what the main thread computes for the loop while it waits for it."""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from lightning_rl.errors import LightningRLError, RunInterrupted, StalledError
from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.run.loop.interrupts import Interrupts
from lightning_rl.run.loop.threads import hanging_threads
from lightning_rl.run.processes import cores
from lightning_rl.run.processes.cores import compute


def here() -> str:
    return threading.current_thread().name


def elsewhere(function):
    """Return what a function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(10)
    return results[0]


@contextmanager
def listening():
    """Let signals end a wait, as in a run."""
    interrupts = Interrupts()
    interrupts.install(runtime.is_waiting)
    try:
        yield
    finally:
        interrupts.remove()


def test_the_main_thread_makes_calls_while_it_waits():
    async def there() -> list[str]:
        return [here(), await runtime.in_main_thread(here), await runtime.in_main_thread(here)]

    main = threading.main_thread().name
    for _ in range(20):  # from the first moment on
        assert run_async(there()) == ["lightning_rl", main, main]


def test_another_thread_that_waits_makes_none():
    assert elsewhere(lambda: run_async(runtime.in_main_thread(here))) == "lightning_rl"


def test_in_a_loop_of_the_main_thread_itself_a_call_is_just_made():
    assert asyncio.run(runtime.in_main_thread(lambda: 1)) == 1


def test_an_error_reaches_who_handed_the_call_in():
    async def there() -> str:
        with pytest.raises(ZeroDivisionError):
            await runtime.in_main_thread(lambda: 1 / 0)
        return "went on"

    assert run_async(there()) == "went on"


def test_calls_that_nobody_has_begun_with_are_made_by_the_loop():
    """The calls are of a task that goes on after the main thread has got what it waited for."""
    places: list[str] = []
    over = threading.Event()

    async def goes_on() -> None:
        for _ in range(200):
            places.append(await runtime.in_main_thread(here))
        over.set()

    tasks: list[asyncio.Task[None]] = []

    async def begins() -> None:
        tasks.append(asyncio.create_task(goes_on()))
        await asyncio.sleep(0)

    run_async(begins())
    assert over.wait(10)
    assert len(places) == 200
    assert places[-1] == "lightning_rl"


def test_a_call_whose_service_is_broken_off_is_made_by_the_loop():
    """A signal between the ring and the call breaks it off: the main thread leaves."""
    places: list[str] = []
    over = threading.Event()

    async def hands_in() -> None:
        places.append(await runtime.in_main_thread(here))
        over.set()

    tasks: list[asyncio.Task[None]] = []

    async def begins() -> None:
        tasks.append(asyncio.create_task(hands_in()))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    for _ in range(20):  # at whatever place it hits the main thread
        over.clear()
        with listening(), pytest.raises(RunInterrupted, match="SIGTERM"):
            run_async(begins())
        assert over.wait(10)
    assert set(places) <= {"lightning_rl", "MainThread"}


def test_while_it_computes_the_main_thread_does_not_only_wait():
    seen = run_async(
        runtime.in_main_thread(lambda: (runtime.is_waiting(), runtime.main_calls.busy))
    )
    assert seen == (False, True)
    assert not runtime.main_calls.busy


def test_a_call_that_lasts_counts_as_no_progress():
    def lasts() -> float:
        time.sleep(0.3)
        return runtime.stalled_seconds()

    assert run_async(runtime.in_main_thread(lasts)) >= 0.3


def test_meanwhile_the_main_thread_may_wait_for_something_else():
    """It serves calls again then, and what it did counts as no progress."""
    seen, before = [], time.monotonic()

    async def lasts() -> str:
        while len(seen) < 3:
            await asyncio.sleep(0.05)
        return await runtime.in_main_thread(here)

    def looks() -> None:
        waiting, stalled = runtime.is_waiting(), runtime.stalled_seconds()
        seen.append((waiting, stalled, run_async(runtime.in_main_thread(here))))

    main = threading.main_thread().name
    stalls = []
    runtime.guard = lambda: stalls.append(runtime.stalled_seconds())
    try:
        assert run_async(lasts(), meanwhile=looks) == main
    finally:
        runtime.guard = None
    assert seen == [(False, 0.0, main)] * 3
    assert max(stalls) > 0.4  # of about 0.6 s, for which it asked in vain
    assert time.monotonic() - before >= 0.6


def test_what_is_raised_meanwhile_ends_the_wait():
    cancelled = threading.Event()

    async def lasts() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(ZeroDivisionError):
        run_async(lasts(), meanwhile=lambda: 1 / 0)
    assert cancelled.is_set()


def test_a_signal_waits_for_the_end_of_the_call():
    done = []

    def call() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        done.append("the call")

    with listening(), pytest.raises(RunInterrupted, match="SIGTERM"):
        run_async(runtime.in_main_thread(call))
    assert done == ["the call"]


def test_what_is_given_up_is_so_at_the_end_of_the_call():
    done = []

    def call() -> None:
        runtime.abandon_wait(StalledError("enough"))
        done.append("the call")

    with pytest.raises(StalledError, match="enough"):
        run_async(runtime.in_main_thread(call))
    assert done == ["the call"]


def test_ctrl_c_in_the_middle_of_a_call_ends_the_wait_and_is_told():
    told: list[BaseException] = []

    def call() -> None:
        raise KeyboardInterrupt

    async def hears() -> None:
        try:
            await runtime.in_main_thread(call)
        except LightningRLError as error:
            told.append(error)
            raise

    tasks: list[asyncio.Task[None]] = []

    async def there() -> None:
        tasks.append(asyncio.create_task(hears()))
        await asyncio.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        run_async(there())
    end = time.monotonic() + 10
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    assert "interrupted by KeyboardInterrupt" in str(told[0])
    assert run_async(runtime.in_main_thread(lambda: 1)) == 1
    assert runtime.loop.is_running()


@pytest.mark.parametrize(("threads", "place"), [(1, "lightning_rl"), (2, "MainThread")])
def test_a_model_with_several_threads_computes_where_training_does(monkeypatch, threads, place):
    monkeypatch.setattr(cores.torch, "get_num_threads", lambda: threads)
    assert run_async(compute(here, on_cpu=True)) == place


async def started(coroutine) -> asyncio.Task:
    """Start a task of the loop, in which nobody waits for it."""
    return asyncio.get_running_loop().create_task(coroutine)


def outcome_of(task: asyncio.Task, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not task.done() and time.monotonic() < end:
        time.sleep(0.005)
    return task.result()


@pytest.mark.parametrize("threads", [1, 2])
def test_while_the_main_thread_trains_a_model_computes_beside_the_loop(monkeypatch, threads):
    monkeypatch.setattr(cores.torch, "get_num_threads", lambda: threads)

    async def later() -> str:
        while runtime.main_calls.is_open:
            await asyncio.sleep(0)
        return await compute(here, on_cpu=True)

    assert outcome_of(run_async(started(later()))) == "lightning_rl engine"


def test_what_the_trainer_asks_the_loop_for_does_not_wait_for_a_step():
    begun, release = threading.Event(), threading.Event()

    def lasts() -> str:
        begun.set()
        release.wait(30)
        return here()

    async def later() -> str:
        while runtime.main_calls.is_open:
            await asyncio.sleep(0)
        return await compute(lasts, on_cpu=True)

    async def quick() -> int:
        return 1

    step = run_async(started(later()))
    try:
        assert begun.wait(10)
        for _ in range(5):
            assert run_async(quick(), timeout=10) == 1
        assert not step.done()
    finally:
        release.set()
    assert outcome_of(step) == "lightning_rl engine"


def test_a_step_beside_the_loop_that_hangs_is_left_behind():
    release, begun = threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        release.wait(30)

    step = run_async(started(runtime.in_engine_thread(hangs)))
    try:
        assert begun.wait(10)
        hanging = runtime.abandon_engine_call()
        assert hanging in hanging_threads()
        with pytest.raises(asyncio.CancelledError):
            outcome_of(step)
        assert run_async(runtime.in_engine_thread(here)) == "lightning_rl engine"
        assert hanging.is_alive()
    finally:
        release.set()
    assert runtime.abandon_engine_call() is None


def test_in_a_loop_of_somebody_elses_a_model_just_computes():
    assert asyncio.run(compute(here, on_cpu=True)) == here()


def test_the_trainers_autocast_is_not_the_engines(monkeypatch):
    monkeypatch.setattr(cores.torch, "get_num_threads", lambda: 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert run_async(compute(lambda: torch.is_autocast_enabled("cpu"), on_cpu=True)) is False
        assert torch.is_autocast_enabled("cpu")
