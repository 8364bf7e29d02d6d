"""One event loop in the background: where engines step, agents wait and rewards are awaited."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_waiting = False


def is_waiting() -> bool:
    """Whether the main thread does nothing but wait here: an error raised in it breaks nothing."""
    return _waiting


def background_loop() -> asyncio.AbstractEventLoop:
    """The process's loop, started when first asked for.

    One for everything, so that what one call leaves behind (requests in flight, producers) goes on
    while the caller trains, and no lock or event ever belongs to another loop.
    """
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="lightning_rl", daemon=True).start()
    return _loop


def run_async(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run to the end in the background loop, and return or raise what it does.

    Interrupting the wait (Ctrl-C), or its end after ``timeout`` seconds, cancels the coroutine.
    Works in notebooks too, whose own event loop is busy.

    Raises:
        TimeoutError: after ``timeout`` seconds; None waits for ever.
    """
    global _waiting
    loop = background_loop()
    done = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_tell(coroutine, done), loop)
    main = threading.current_thread() is threading.main_thread()
    try:
        _waiting = _waiting or main
        try:
            return future.result(timeout)
        finally:
            _waiting = _waiting and not main
    except BaseExceptionGroup as group:
        raise innermost(group) from group
    except BaseException:
        if not future.done():
            future.cancel()
            # Let it clean up, but never hang on an interrupt.
            done.wait(5.0 if timeout is None else 0.0)
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
