"""The process's event loop in the background, and the main thread's wait for it.

In the loop agents wait and rewards are awaited. Engines step in it, in the main thread while that
waits for them, or in a thread of their own.
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

from lightning_rl.run.loop.main_calls import MainCalls
from lightning_rl.run.loop.threads import CallingThread, leave_behind

T = TypeVar("T")

_CLEAN_UP_S = 5.0
"""How long a wait that was broken off lets what it waited for clean up."""
_LISTEN_S = 0.2
"""How often a waiting main thread looks for signals."""
TURN_S = 5.0
"""How long a loop may take to come to its next task; then something blocks it."""

_broken_off: ContextVar[threading.Event | None] = ContextVar("broken_off", default=None)


class Runtime:
    """An event loop in a thread, the main thread that waits for it, and a thread for engines.

    There is one in a process, ``runtime``, for everything: so what one call leaves behind (requests
    in flight, producers) goes on while the caller trains, and no lock or event ever belongs to
    another loop.

    ``guard`` is called by the main thread again and again while it waits; it may raise.
    ``main_calls`` are what it makes for coroutines meanwhile.
    """

    def __init__(self) -> None:
        self.guard: Callable[[], None] | None = None
        self.thread: threading.Thread | None = None
        """The loop's, if it was ever asked for."""
        self._reset()

    def _reset(self) -> None:
        """Begin anew, as a forked child must: it has no threads but its own."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.main_calls = MainCalls()
        self._engine = CallingThread("lightning_rl engine")
        self._awaited: Future[Any] | None = None  # what the main thread waits for
        self._abandoned: BaseException | None = None  # why it does no longer
        self._progress = 0.0

    # ---------------------------------------------------------------- the loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Started when first asked for."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(
                    target=_run_forever, args=(self._loop,), name="lightning_rl", daemon=True
                )
                self.thread.start()
            return self._loop

    def abandon_loop(self) -> None:
        """Abandon a blocked event loop; the next caller gets a new one."""
        with self._lock:
            if self._loop is not None and self.thread is not None:
                leave_behind(self.thread)
            self._loop = None

    def abandon_blocked_loop(self, timeout: float | None = None) -> bool:
        """Give it up if a task blocks it for so long (``TURN_S``); returns whether it was."""
        if self._loop is None:
            return False
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if turned.wait(TURN_S if timeout is None else timeout):
            return False
        self.abandon_loop()
        return True

    def run_async(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> T:
        """Run to the end in the background loop, and return or raise what it does.

        The main thread calls ``meanwhile`` about five times a second while it waits. That may call
        ``run_async`` in turn, and what it raises breaks the wait off.

        Interrupting the wait (Ctrl-C), or its end after ``timeout`` seconds, cancels the coroutine.
        A loop that something blocks is given up then.
        Works in notebooks too, whose own event loop is busy.

        Raises:
            TimeoutError: after ``timeout`` seconds; None waits for ever.
        """
        loop = self.loop
        done, broken_off = threading.Event(), threading.Event()
        with self._taking_calls():  # before the loop can have one for it
            future = asyncio.run_coroutine_threadsafe(_tell(coroutine, done, broken_off), loop)
            try:
                return self._wait(future, timeout, meanwhile)
            except BaseExceptionGroup as group:
                raise innermost(group) from group
            except BaseException:
                broken_off.set()
                cancelled = future.cancel() or future.cancelled()
                waits = cancelled and timeout is None and loop is self._loop  # else it was given up
                # Let it clean up, but never hang on an interrupt.
                if waits and not done.wait(_CLEAN_UP_S):
                    self.abandon_blocked_loop()
                raise

    # ---------------------------------------------------------------- the main thread's wait

    def wait(self, future: Future[T], timeout: float | Callable[[], float] | None = None) -> T:
        """The result of what another thread works on; in the main thread it can be broken off.

        By signals, by :meth:`abandon_wait`, and by ``guard``. Meanwhile the main thread makes the
        calls that :meth:`in_main_thread` has for it.

        Args:
            future: what it works on.
            timeout: seconds; None waits for ever, a function tells again and again how many are
                left.

        Raises:
            TimeoutError: when they are over.
        """
        with self._taking_calls():
            return self._wait(future, timeout)

    def _wait(
        self,
        future: Future[T],
        timeout: float | Callable[[], float] | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> T:
        left = timeout if callable(timeout) else _countdown(timeout)
        if not _in_main_thread():
            while not future.done() and left() > 0:
                wait_for([future], min(left(), _LISTEN_S))
            return future.result(0)
        self.note_progress()
        due = time.monotonic() + _LISTEN_S
        future.add_done_callback(lambda _: self.main_calls.wake())
        try:
            try:
                self._awaited = future
                self._look_up()  # only now, so that no signal falls in between unheard
                while not future.done():
                    if meanwhile is not None and time.monotonic() >= due:
                        self._make(meanwhile)
                        due = time.monotonic() + _LISTEN_S
                    seconds = left()
                    if seconds <= 0:
                        raise TimeoutError
                    # A signal that comes just before the thread falls asleep does not wake it.
                    self.main_calls.serve(min(seconds, _LISTEN_S))
                    self._look_up()
            finally:
                self._awaited = None
            return future.result()
        except CancelledError:
            error, self._abandoned = self._abandoned, None
            if error is None:
                raise
            raise error from None

    def _make(self, call: Callable[[], None]) -> None:
        """Make a call in the middle of a wait, whose seconds do not count as waiting."""
        future, self._awaited = self._awaited, None
        progress, begin = self._progress, time.monotonic()
        try:
            call()
        finally:
            self._awaited = future
            self._progress = progress + time.monotonic() - begin

    @contextmanager
    def _taking_calls(self) -> Iterator[None]:
        """Have the main thread take calls in the block; others take none."""
        if not _in_main_thread():
            yield
            return
        if self.main_calls.is_open:  # in a wait that makes another meanwhile
            yield
            return
        self.main_calls.open()
        try:
            yield
        finally:
            self.main_calls.close()

    def _look_up(self) -> None:
        if self.guard is not None:
            self.guard()

    def note_progress(self) -> None:
        """Something that the main thread may be waiting for came nearer."""
        self._progress = time.monotonic()

    def stalled_seconds(self) -> float:
        """Seconds that the main thread has been waiting without progress; 0 if it is not."""
        return time.monotonic() - self._progress if self._awaited is not None else 0.0

    def is_waiting(self) -> bool:
        """Tell whether the main thread only waits: an error raised in it breaks nothing."""
        return self._awaited is not None and not self.main_calls.busy

    def abandon_wait(self, error: BaseException) -> None:
        """Cancel what the main thread waits for, and let it raise ``error`` instead.

        Any thread may. A call that it is in the middle of comes to its end first.
        """
        future, self._abandoned = self._awaited, error
        if future is None or not future.cancel():  # it has just got what it waited for
            self._abandoned = None

    # ---------------------------------------------------------------- calls of coroutines

    async def in_main_thread(self, call: Callable[[], T]) -> T:
        """The result of a call, made in the main thread if that waits, else in this one.

        The main thread hears of signals when it is over.
        """
        future = self.main_calls.submit(call)
        if future is None:
            return call()
        result: T = await asyncio.wrap_future(future)
        return result

    async def in_engine_thread(self, call: Callable[[], T]) -> T:
        """The result of a call, made in a thread beside the loop, which turns on meanwhile.

        In any other loop, that of whoever runs one, it is just made.
        """
        if threading.current_thread() is not self.thread:
            return call()
        result: T = await self._engine.heard(self._engine.submit(call))
        return result

    def abandon_engine_call(self) -> threading.Thread | None:
        """Give up the call in the engine's thread, if there is one; returns that thread."""
        return self._engine.abandon_current()


runtime = Runtime()
"""This process's."""
run_async, wait, note_progress = runtime.run_async, runtime.wait, runtime.note_progress

os.register_at_fork(after_in_child=runtime._reset)


def require_awaited() -> None:
    """Look, in a long computation of the loop's, whether its result is still waited for.

    The loop does not turn meanwhile, and cannot cancel it.

    Raises:
        asyncio.CancelledError: if the wait for it was broken off.
    """
    broken_off = _broken_off.get()
    if broken_off is not None and broken_off.is_set():
        raise asyncio.CancelledError


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


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Go on where a task raised SystemExit, which asyncio lets through after the task has it."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt):
            continue


async def _tell(
    coroutine: Coroutine[Any, Any, T], done: threading.Event, broken_off: threading.Event
) -> T:
    _broken_off.set(broken_off)
    try:
        return await coroutine
    finally:
        done.set()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _countdown(seconds: float | None) -> Callable[[], float]:
    """How many of these seconds are left, from now on."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    return lambda: end - time.monotonic()
