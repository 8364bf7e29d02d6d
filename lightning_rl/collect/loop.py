"""One event loop in the background: where engines step, agents wait and rewards are awaited."""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")

_CLEAN_UP_S = 5.0
"""How long a wait that was broken off lets what it waited for clean up."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_awaited: Future[Any] | None = None  # what the main thread waits for
_abandoned: BaseException | None = None  # why it does no longer
_progress = 0.0


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


def replace_loop() -> None:
    """Give a loop up that no longer turns; whoever asks next gets a new one."""
    global _loop
    with _lock:
        _loop = None


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


def run_async(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run to the end in the background loop, and return or raise what it does.

    Interrupting the wait (Ctrl-C), or its end after ``timeout`` seconds, cancels the coroutine.
    Works in notebooks too, whose own event loop is busy.

    Raises:
        TimeoutError: after ``timeout`` seconds; None waits for ever.
    """
    global _awaited, _abandoned
    loop = background_loop()
    done = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_tell(coroutine, done), loop)
    main = threading.current_thread() is threading.main_thread()
    try:
        if main:
            note_progress()
            _awaited = future
        try:
            return future.result(timeout)
        finally:
            if main:
                _awaited = None
    except CancelledError:
        error, _abandoned = _abandoned, None
        if not main or error is None:
            raise
        if loop is background_loop():  # else it was given up
            done.wait(_CLEAN_UP_S)
        raise error from None
    except BaseExceptionGroup as group:
        raise innermost(group) from group
    except BaseException:
        if not future.done():
            future.cancel()
            # Let it clean up, but never hang on an interrupt.
            done.wait(_CLEAN_UP_S if timeout is None else 0.0)
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
