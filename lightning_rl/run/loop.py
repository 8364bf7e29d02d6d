"""One event loop in the background, the main thread's wait for it, and what it does meanwhile.

In the loop agents wait and rewards are awaited. Engines step in it, in the main thread while that
waits for them, or beside both.
"""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait as wait_for
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from lightning_rl.run.desk import Desk
from lightning_rl.run.threads import CallingThread, leave_behind

T = TypeVar("T")

_CLEAN_UP_S = 5.0
"""How long a wait that was broken off lets what it waited for clean up."""
_LISTEN_S = 0.2
"""How often a waiting main thread looks for signals."""
TURN_S = 5.0
"""How long a loop may take to come to its next task; then something blocks it."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_awaited: Future[Any] | None = None  # what the main thread waits for
_abandoned: BaseException | None = None  # why it does no longer
_progress = 0.0
_guard: Callable[[], None] | None = None
_desk = Desk()  # of the main thread
_beside = CallingThread("lightning_rl engine")
_broken_off: ContextVar[threading.Event | None] = ContextVar("broken_off", default=None)


def is_waiting() -> bool:
    """Tell whether the main thread only waits here: an error raised in it breaks nothing."""
    return _awaited is not None and not _desk.busy


def is_computing() -> bool:
    """Tell whether the main thread is in a call of :func:`in_waiting_thread`."""
    return _desk.busy


def takes_calls() -> bool:
    """Tell whether :func:`in_waiting_thread` would have a call made in the main thread."""
    return _desk.is_open


def replace_thread_beside() -> threading.Thread | None:
    """Give up the thread of :func:`beside_loop`, if it is in the middle of a call; returns it."""
    return _beside.abandon_current()


def note_progress() -> None:
    """Something that the main thread may be waiting for came nearer."""
    global _progress
    _progress = time.monotonic()


def stalled_seconds() -> float:
    """Seconds that the main thread has been waiting here without progress; 0 if it is not."""
    return time.monotonic() - _progress if _awaited is not None else 0.0


def abandon_wait(error: BaseException) -> None:
    """Cancel what the main thread waits for, and let it raise ``error`` instead; any thread may.

    A call that it is in the middle of comes to its end first.
    """
    global _abandoned
    future, _abandoned = _awaited, error
    if future is None or not future.cancel():  # it has just got what it waited for
        _abandoned = None


def loop_thread() -> threading.Thread | None:
    """The thread of the background loop, if it was ever asked for."""
    return _thread


def guard_waits(guard: Callable[[], None] | None) -> None:
    """Have the main thread call this at the beginning of each wait; it may raise."""
    global _guard
    _guard = guard


def replace_loop() -> None:
    """Give a loop up that no longer turns; whoever asks next gets a new one."""
    global _loop
    with _lock:
        if _loop is not None and _thread is not None:
            leave_behind(_thread)
        _loop = None


def replace_loop_if_blocked(timeout: float | None = None) -> bool:
    """Give the loop up if a task blocks it for so long (``TURN_S``); returns whether it was."""
    if _loop is None:
        return False
    turned = threading.Event()
    _loop.call_soon_threadsafe(turned.set)
    if turned.wait(TURN_S if timeout is None else timeout):
        return False
    replace_loop()
    return True


def background_loop() -> asyncio.AbstractEventLoop:
    """The process's loop, started when first asked for.

    One for everything, so that what one call leaves behind (requests in flight, producers) goes on
    while the caller trains, and no lock or event ever belongs to another loop.
    """
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="lightning_rl", daemon=True)
            _thread.start()
        return _loop


def require_awaited() -> None:
    """Look, in a long computation of the loop's, whether its result is still waited for.

    The loop does not turn meanwhile, and cannot cancel it.

    Raises:
        asyncio.CancelledError: if :func:`run_async` was broken off.
    """
    broken_off = _broken_off.get()
    if broken_off is not None and broken_off.is_set():
        raise asyncio.CancelledError


async def in_waiting_thread(call: Callable[[], T]) -> T:
    """The result of a call, made in the main thread if that waits here, else in this one.

    The main thread hears of signals when it is over.
    """
    handed = _desk.hand_in(call)
    if handed is None:
        return call()
    result: T = await handed.heard()
    return result


async def beside_loop(call: Callable[[], T]) -> T:
    """The result of a call, made in a thread beside the background loop, which turns on meanwhile.

    In any other loop, that of whoever runs one, it is just made.
    """
    if threading.current_thread() is not _thread:
        return call()
    result: T = await _beside.heard(_beside.submit(call))
    return result


def wait(future: Future[T], timeout: float | Callable[[], float] | None = None) -> T:
    """The result of what another thread works on; in the main thread the wait can be broken off.

    By signals, by :func:`abandon_wait`, and by what :func:`guard_waits` was given. Meanwhile the
    main thread makes the calls that :func:`in_waiting_thread` has for it.

    Args:
        future: what it works on.
        timeout: seconds; None waits for ever, a function tells again and again how many are left.

    Raises:
        TimeoutError: when they are over.
    """
    global _awaited, _abandoned
    left = timeout if callable(timeout) else _countdown(timeout)
    if threading.current_thread() is not threading.main_thread():
        while not future.done() and left() > 0:
            wait_for([future], min(left(), _LISTEN_S))
        return future.result(0)
    note_progress()
    future.add_done_callback(lambda _: _desk.ring())
    try:
        with _open_desk():
            try:
                _awaited = future
                _look_up()  # only now, so that no signal falls in between unheard
                _serve(future, left)
            finally:
                _awaited = None
        return future.result()
    except CancelledError:
        error, _abandoned = _abandoned, None
        if error is None:
            raise
        raise error from None


@contextmanager
def _open_desk() -> Iterator[None]:
    """Have the main thread take calls in the block; others take none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _desk.open()
    try:
        yield
    finally:
        _desk.close()


def _countdown(seconds: float | None) -> Callable[[], float]:
    """How many of these seconds are left, from now on."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    return lambda: end - time.monotonic()


def _serve(future: Future[Any], left: Callable[[], float]) -> None:
    """Make the calls that come in, until there is a result."""
    while not future.done():
        seconds = left()
        if seconds <= 0:
            raise TimeoutError
        # A signal that comes just before the thread falls asleep does not wake it.
        _desk.serve(min(seconds, _LISTEN_S))
        _look_up()


def _look_up() -> None:
    if _guard is not None:
        _guard()


def run_async(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run to the end in the background loop, and return or raise what it does.

    Interrupting the wait (Ctrl-C), or its end after ``timeout`` seconds, cancels the coroutine. A
    loop that something blocks is given up then.
    Works in notebooks too, whose own event loop is busy.

    Raises:
        TimeoutError: after ``timeout`` seconds; None waits for ever.
    """
    loop = background_loop()
    done, broken_off = threading.Event(), threading.Event()
    with _open_desk():  # before the loop can have a call for it
        future = asyncio.run_coroutine_threadsafe(_tell(coroutine, done, broken_off), loop)
        try:
            return wait(future, timeout)
        except BaseExceptionGroup as group:
            raise innermost(group) from group
        except BaseException:
            broken_off.set()
            cancelled = future.cancel() or future.cancelled()
            waits = cancelled and timeout is None and loop is _loop  # else it was given up
            # Let it clean up, but never hang on an interrupt.
            if waits and not done.wait(_CLEAN_UP_S):
                replace_loop_if_blocked()
            raise


async def _tell(
    coroutine: Coroutine[Any, Any, T], done: threading.Event, broken_off: threading.Event
) -> T:
    _broken_off.set(broken_off)
    try:
        return await coroutine
    finally:
        done.set()


async def cancel_here(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their ends; those of a loop that was given up end with it."""
    here = asyncio.get_running_loop()
    own = [task for task in tasks if task.get_loop() is here]
    for task in own:
        task.cancel()
    await asyncio.gather(*own, return_exceptions=True)


def innermost(error: BaseException) -> BaseException:
    """Unwrap what went wrong from the group that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _forget_loop() -> None:
    """A forked child has no threads but its own."""
    global _loop, _lock, _desk, _beside
    _loop, _lock, _desk = None, threading.Lock(), Desk()
    _beside = CallingThread("lightning_rl engine")


os.register_at_fork(after_in_child=_forget_loop)
