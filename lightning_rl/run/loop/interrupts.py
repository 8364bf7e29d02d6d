"""Turn signals and a deadline into a stop at a point from which the run can be resumed."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_rl.errors import ConfigError, RunInterrupted
from lightning_rl.run.loop.background import runtime

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupts:
    """Remembers requests to stop the run; raises ``RunInterrupted`` where that is safe.

    Outside the main thread signals cannot be handled; the deadline still holds.

    ``deadline``, in seconds of ``time.monotonic()``, is a request as well. Once ``ending`` is True
    nothing is raised any more, so that saving and cleaning up are not interrupted.
    """

    def __init__(self) -> None:
        self.deadline = math.inf
        self.ending = False
        self._reason: tuple[str, int] | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._safe: Callable[[], bool] | None = None

    def install(self, safe: Callable[[], bool], further: signal.Signals | None = None) -> None:
        """Start to handle signals and the deadline.

        Args:
            safe: returns True if the main thread may be interrupted at once.
            further: a signal to handle in addition to the usual ones.

        Raises:
            RunInterrupted: if a signal came while the run was starting, and its error was
                swallowed.
        """
        if _stop is not None:  # while the run started, where somebody caught it
            raise _stop
        self._safe, self.ending, self._reason = safe, False, None
        if threading.current_thread() is not threading.main_thread():
            return
        runtime.guard = self._raise_if_safe
        numbers: set[int] = {*SIGNALS} if further is None else {*SIGNALS, further}
        for number in numbers:
            before = signal.getsignal(number)
            # A handler of the user's own for what is the user's signal stays.
            if number != signal.SIGUSR1 or before in (*_NO_HANDLERS, _stop_starting):
                self._before[number] = before
                signal.signal(number, self._on_signal)
        if signal.SIGUSR1 in self._before and self.deadline < math.inf:
            # A signal, because nothing else wakes a main thread that waits.
            main = threading.main_thread().ident
            assert main is not None
            wait = max(0.0, self.deadline - time.monotonic())
            self._timer = threading.Timer(wait, signal.pthread_kill, (main, signal.SIGUSR1))
            self._timer.daemon = True
            self._timer.start()

    def remove(self) -> None:
        """Restore the earlier signal handlers; those of a command's start become its end's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        runtime.guard = None
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, _AFTERWARDS[number] if handler is _stop_starting else handler)

    def requested(self) -> RunInterrupted | None:
        """The error to raise if the run is to stop; else None."""
        if self._reason is None and time.monotonic() >= self.deadline:
            self._reason = "max_time is reached", 124  # as timeout(1) says
        return None if self._reason is None else RunInterrupted(*self._reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None and time.monotonic() < self.deadline:
            self._reason = signal.Signals(number).name, 128 + number
        if number == signal.SIGINT:  # once more: at once, without saving
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._raise_if_safe()
        interruption = self.requested()
        assert interruption is not None
        does = "the run is already ending" if self.ending else "stopping after this update"
        # Not print: it may be what was interrupted.
        os.write(2, f"\n{interruption.reason}: {does}\n".encode())

    def _raise_if_safe(self) -> None:
        interruption = None if self.ending else self.requested()
        if interruption is not None and self._safe is not None and self._safe():
            self.ending = True
            raise interruption


# ---------------------------------------------------------------- while a command starts

_NO_HANDLERS = (signal.SIG_DFL, signal.SIG_IGN)
_before_start: dict[int, Any] = {}
_stop: RunInterrupted | None = None
"""The error that a signal raised while the run was starting: a parser may have swallowed it."""
_HEARD_S = 10.0
"""Seconds that the main thread may take to notice a signal while a run starts."""


@contextmanager
def stopped_while_starting() -> Iterator[None]:
    """Until the run handles signals itself, turn them into one error message and an end.

    A main thread outside Python code, such as one that waits for ranks that never come, does not
    notice a signal. The process then ends without it after ten seconds.

    Raises:
        RunInterrupted: wherever the main thread is.
    """
    global _stop
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _before_start.update((n, signal.signal(n, _stop_starting)) for n in SIGNALS)
    over = threading.Event()
    threading.Thread(target=_end_if_unheard, args=(reader, over), daemon=True).start()
    try:
        yield
    except (Exception, SystemExit) as error:
        if _stop is not None and error is not _stop:
            raise _stop from None
        raise
    finally:
        over.set()
        _stop = None
        while _before_start:
            signal.signal(*_before_start.popitem())
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end_if_unheard(reader: int, over: threading.Event) -> None:
    """In a thread: read signal numbers until the other end of the pipe is closed.

    ``over`` is set when this start ends: a later one of the same process has the same handler.
    """
    while number := os.read(reader, 1):
        heard = over.wait(_HEARD_S)
        if not heard and signal.getsignal(number[0]) is _stop_starting:
            os.write(2, f"lightning-rl: run interrupted: {_while_starting(number[0])}\n".encode())
            os._exit(128 + number[0])
    os.close(reader)


def _while_starting(number: int) -> str:
    return (
        f"{signal.Signals(number).name} came while the run was starting, so there is nothing to "
        "save; run the same command again"
    )


def _forget_pipe() -> None:
    """Detach a forked child from the pipe, so that its signals are not reported here."""
    if _before_start:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_pipe)


def _stop_starting(number: int, frame: FrameType | None) -> None:
    global _stop
    for other, handler in _AFTERWARDS.items():
        signal.signal(other, handler)
    _stop = RunInterrupted(_while_starting(number), 128 + number)
    raise _stop


def _end_anyway(number: int, frame: FrameType | None) -> None:
    os.write(2, f"\n{signal.Signals(number).name}: the run is already ending\n".encode())


_AFTERWARDS: dict[int, Callable[[int, FrameType | None], object]] = {
    signal.SIGTERM: _end_anyway,
    signal.SIGUSR1: _end_anyway,
    signal.SIGINT: signal.default_int_handler,  # once more: at once
}


def seconds_of(max_time: str) -> float:
    """Convert ``DD:HH:MM:SS``, the format of Lightning's Trainer, to seconds.

    Raises:
        ConfigError: if the format is another.
    """
    found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", max_time.strip())
    if found is None:
        raise ConfigError(f"max_time={max_time!r} must be DD:HH:MM:SS; 00:03:30:00 is 3.5 hours")
    days, hours, minutes, seconds = (int(part) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
