"""One event loop in the background, the main thread's wait for it, and what may stop the wait.

In the loop engines step, agents wait and rewards are awaited. Signals and a deadline are turned
into a stop at a place from which a run can go on.
"""

import asyncio
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from types import FrameType
from typing import Any, TypeVar

from lightning_rl.errors import ConfigError, RunInterrupted
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
    """Tell whether the main thread only waits here: an error raised in it breaks nothing."""
    return _awaited is not None


def note_progress() -> None:
    """Something that the main thread may be waiting for came nearer."""
    global _progress
    _progress = time.monotonic()


def stalled_seconds() -> float:
    """Seconds that the main thread has been waiting here without progress; 0 if it is not."""
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
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


# ---------------------------------------------------------------- signals and the deadline

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupts:
    """Memory of what asked the run to stop; raises ``RunInterrupted`` where that is safe.

    Outside the main thread there are no signals; the deadline is still kept.

    Args:
        seconds: the deadline, from now.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds
        self._reason: tuple[str, int] | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._safe: Callable[[], bool] = lambda: False
        self._raised = False

    def install(self, safe: Callable[[], bool]) -> None:
        """Listen from now on; ``safe`` tells whether the main thread may be interrupted at once."""
        self._safe, self._raised = safe, False
        if threading.current_thread() is not threading.main_thread():
            return
        guard_waits(self._raise_if_safe)
        for number in SIGNALS:
            before = signal.getsignal(number)
            # Lightning has SIGUSR1 itself where it puts SLURM jobs back into the queue.
            if number != signal.SIGUSR1 or before in (signal.SIG_DFL, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._on_signal)
        if signal.SIGUSR1 in self._before and self._end < math.inf:
            # A signal, because nothing else wakes a main thread that waits.
            main = threading.main_thread().ident
            assert main is not None
            wait = max(0.0, self._end - time.monotonic())
            self._timer = threading.Timer(wait, signal.pthread_kill, (main, signal.SIGUSR1))
            self._timer.daemon = True
            self._timer.start()

    def remove(self) -> None:
        """Put back what handled the signals before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        guard_waits(None)
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def requested(self) -> RunInterrupted | None:
        """The error to raise, if the run is to stop."""
        if self._reason is None and time.monotonic() >= self._end:
            self._reason = "max_time is over", 124  # as timeout(1) says
        return None if self._reason is None else RunInterrupted(*self._reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None and time.monotonic() < self._end:
            self._reason = signal.Signals(number).name, 128 + number
        if number == signal.SIGINT:  # once more: at once, without saving
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._raise_if_safe()
        if not self._raised:
            interruption = self.requested()
            assert interruption is not None
            # Not print: it may be what was interrupted.
            os.write(2, f"\n{interruption.reason}: saving after this update\n".encode())

    def _raise_if_safe(self) -> None:
        """Raise, but once: what saves and tidies up afterwards waits too."""
        interruption = None if self._raised else self.requested()
        if interruption is not None and self._safe():
            self._raised = True
            raise interruption


def seconds_of(max_time: str) -> float:
    """Seconds of ``DD:HH:MM:SS``, as Lightning's Trainer writes it.

    Raises:
        ConfigError: for another format.
    """
    found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", max_time.strip())
    if found is None:
        raise ConfigError(f"max_time={max_time!r} must be DD:HH:MM:SS; 00:03:30:00 is 3.5 hours")
    days, hours, minutes, seconds = (int(part) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
