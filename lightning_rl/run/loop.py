"""One event loop in the background: where engines step, agents wait and rewards are awaited."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from lightning_rl.run.threads import leave_behind

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


def is_waiting() -> bool:
    """Whether the main thread does nothing but wait here: an error raised in it breaks nothing."""
    return _awaited is not None


def note_progress() -> None:
    """Something that the main thread may be waiting for came nearer."""
    global _progress
    _progress = time.monotonic()


def stalled_seconds() -> float:
    """For how long the main thread has been waiting here without any progress; 0 if it is not."""
    return time.monotonic() - _progress if is_waiting() else 0.0


def abandon_wait(error: BaseException) -> None:
    """Cancel what the main thread waits for, and let it raise ``error`` instead; any thread may."""
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


def wait(future: Future[T], timeout: float | None = None) -> T:
    """The result of what another thread works on; in the main thread the wait can be broken off.

    By signals, by :func:`abandon_wait`, and by what :func:`guard_waits` was given.

    Raises:
        TimeoutError: after ``timeout`` seconds; None waits for ever.
    """
    global _awaited, _abandoned
    if threading.current_thread() is not threading.main_thread():
        return future.result(timeout)
    note_progress()
    _awaited = future
    try:
        if _guard is not None:  # only now, so that no signal falls in between unheard
            _guard()
        _wait_listening(future, timeout)
        return future.result()
    except CancelledError:
        error, _abandoned = _abandoned, None
        if error is None:
            raise
        raise error from None
    finally:
        _awaited = None


def _wait_listening(future: Future[Any], timeout: float | None) -> None:
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            # A signal that comes just before the thread falls asleep does not wake it.
            future.exception(min(left, _LISTEN_S))
            return
        except TimeoutError:  # of the wait: what the future raises is returned above
            if left <= _LISTEN_S:
                raise


def run_async(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run to the end in the background loop, and return or raise what it does.

    Interrupting the wait (Ctrl-C), or its end after ``timeout`` seconds, cancels the coroutine. A
    loop that something blocks is given up then.
    Works in notebooks too, whose own event loop is busy.

    Raises:
        TimeoutError: after ``timeout`` seconds; None waits for ever.
    """
    loop = background_loop()
    done = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_tell(coroutine, done), loop)
    try:
        return wait(future, timeout)
    except BaseExceptionGroup as group:
        raise innermost(group) from group
    except BaseException:
        broken_off = future.cancel() or future.cancelled()
        waits = broken_off and timeout is None and loop is _loop  # else it was given up
        # Let it clean up, but never hang on an interrupt.
        if waits and not done.wait(_CLEAN_UP_S):
            replace_loop_if_blocked()
        raise


async def _tell(coroutine: Coroutine[Any, Any, T], done: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        done.set()


def innermost(error: BaseException) -> BaseException:
    """What went wrong, not the group that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _forget_loop() -> None:
    """A forked child has no threads but its own."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)
