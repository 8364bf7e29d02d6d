"""The process's event loop is one object: a second one is apart, and a fork begins anew."""

import asyncio
import gc
import os
import sys
import threading

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback

from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.run.loop.background import Runtime, run_async, runtime
from lightning_rl.run.loop.threads import CallingThread
from tests.support.small_run import data_module, grpo, trainer_of


async def thread_here() -> threading.Thread:
    return threading.current_thread()


def test_two_runtimes_share_nothing():
    other = Runtime()

    def raises() -> None:
        raise AssertionError("the other's wait")

    runtime.guard = raises
    try:
        assert other.run_async(thread_here()) is other.thread
    finally:
        runtime.guard = None
    assert run_async(thread_here()) is runtime.thread is not other.thread
    other.loop.call_soon_threadsafe(other.loop.stop)
    other.thread.join(10)
    assert not other.thread.is_alive()
    assert run_async(thread_here()) is runtime.thread


def test_a_forked_child_has_a_loop_and_an_engine_thread_of_its_own():
    """The child may be forked while the main thread waits, too."""
    run_async(runtime.in_engine_thread(threading.current_thread))

    def fork() -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status = 1
        try:
            own = run_async(thread_here(), timeout=10)
            beside = run_async(runtime.in_engine_thread(threading.current_thread), timeout=10)
            both = {own.name, beside.name} == {"lightning_rl", "lightning_rl engine"}
            status = int(not (both and own.is_alive() and runtime.stalled_seconds() == 0))
        finally:
            os._exit(status)

    assert fork() == 0
    assert run_async(runtime.in_main_thread(fork)) == 0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_task_that_would_end_the_loops_thread_does_not(kind):
    """Asyncio lets these through the loop, where only a task of the awaited one raised them."""

    async def raises() -> None:
        raise kind

    async def hears_of_it() -> type[BaseException]:
        try:
            await asyncio.ensure_future(raises())
        except BaseException as error:
            return type(error)
        raise AssertionError("it went unheard")

    before = run_async(thread_here())
    assert run_async(hears_of_it(), timeout=60) is kind
    assert run_async(thread_here(), timeout=60) is before


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_a_thread_for_calls_ends_when_it_is_closed_and_another_makes_later_calls():
    calling = CallingThread("calls")
    first = calling.submit(threading.current_thread).result(10)
    waiting = [calling.submit(lambda number=number: number) for number in range(3)]
    calling.close()
    assert [future.result(10) for future in waiting] == [0, 1, 2]
    assert ended(first)
    calling.close()  # a second time, which is nothing
    second = calling.submit(threading.current_thread).result(10)
    assert second is not first
    assert second.is_alive()
    del calling
    gc.collect()
    assert ended(second)


def test_a_thread_whose_call_was_abandoned_ends_with_that_call():
    calling, release = CallingThread("calls"), threading.Event()
    stuck = calling.submit(lambda: release.wait(60) and threading.current_thread())
    while (hanging := calling.thread) is None:
        pass
    calling.abandon(stuck)
    second = calling.submit(threading.current_thread).result(10)
    calling.close()
    assert ended(second)
    release.set()
    assert ended(hanging)


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        raise ValueError("planted")


def test_the_switch_interval_is_restored_after_a_failure(tiny_model, tmp_path):
    interval = sys.getswitchinterval()
    data = data_module(group_size=2, groups_per_iteration=2, collector=AsyncCollector())
    with pytest.raises(ValueError, match="planted"):
        trainer_of(tmp_path, [Fails()]).fit(grpo(tiny_model), data)
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("collector", [SyncCollector, AsyncCollector])
def test_a_fit_leaves_no_thread_and_the_switch_interval(tiny_model, tmp_path, collector):
    before = set(threading.enumerate())
    data = data_module(
        group_size=2, groups_per_iteration=2, iterations_per_epoch=2, collector=collector()
    )
    interval, seen = sys.getswitchinterval(), []
    noting = LambdaCallback(on_train_batch_start=lambda *_: seen.append(sys.getswitchinterval()))
    trainer_of(tmp_path, [noting]).fit(grpo(tiny_model), data)
    works_ahead = collector is AsyncCollector
    assert seen == [pytest.approx(0.001 if works_ahead else interval)] * 2
    assert sys.getswitchinterval() == interval
    lasting = {"lightning_rl", "lightning_rl engine", "tqdm_monitor"}  # one in the process
    left = {thread for thread in set(threading.enumerate()) - before if thread.name not in lasting}
    assert all(map(ended, left)), left
