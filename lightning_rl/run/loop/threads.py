"""Calls that may block or hang, made in threads that can be abandoned."""

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

_Waiting: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"

_left_behind: list[threading.Thread] = []


def leave_behind(thread: threading.Thread) -> None:
    """Remember a thread that nobody waits for any more, since its call may never end."""
    _left_behind[:] = [*hanging_threads(), thread]


def hanging_threads() -> list[threading.Thread]:
    """Return the abandoned threads that still run."""
    return [thread for thread in _left_behind if thread.is_alive()]


class CallingThread:
    """A daemon thread that makes one call after another, and is replaced if one never ends.

    A round trip takes some 30 µs. The thread starts with the first call, and ends with this object
    at the latest.

    Args:
        name: the thread's name, for stack traces.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting = self._new_queue()
        self._thread: threading.Thread | None = None
        self._current: Future[Any] | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call and return its future; an exception that would end the process is a
        RuntimeError.

        The future can be cancelled at any time, also while the call runs, whose result is then
        ignored.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.put((future, call))
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._start()
        return future

    async def heard(self, future: Future[Any]) -> Any:
        """Return the result of a submitted call; if this is cancelled, the call is abandoned."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for this call; if it is running, later calls get another thread."""
        future.cancel()
        with self._lock:
            if self._current is future and self._thread is not None:
                leave_behind(self._thread)
                self._start()

    def abandon_current(self) -> threading.Thread | None:
        """Stop waiting for the running call, if there is one; returns its thread."""
        with self._lock:
            current, thread = self._current, self._thread
        if current is None:
            return None
        self.abandon(current)
        return thread

    def close(self) -> None:
        """End the thread once it has made the calls that wait; a later call starts another."""
        with self._lock:
            if self._thread is not None:
                self._waiting.put(None)
                self._waiting, self._thread = self._new_queue(), None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, while it is making a call; else None."""
        with self._lock:
            return None if self._current is None else self._thread

    def _new_queue(self) -> "_Waiting":
        queue: _Waiting = SimpleQueue()
        weakref.finalize(self, queue.put, None)
        return queue

    def _start(self) -> None:
        self._current = None
        arguments = (weakref.ref(self), self._waiting, _cuda_device())
        self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
        self._thread.start()

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> bool:
        """Make a call; returns False if another thread has taken over meanwhile."""
        with self._lock:
            if future.cancelled():
                return True
            self._current = future
        result, error = _outcome(call)
        with self._lock:
            mine = self._current is future
            if mine:
                self._current = None
        # Cancelled a moment ago, perhaps.
        with suppress(InvalidStateError):
            future.set_result(result) if error is None else future.set_exception(error)
        return mine


def _work(owner: "weakref.ref[CallingThread]", waiting: "_Waiting", device: int | None) -> None:
    """Make calls until there is None; in between nothing here keeps the owner alive."""
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
    while (item := waiting.get()) is not None:
        calling = owner()
        if calling is None or not calling._make(*item):
            return
        del calling, item


class CallingThreads:
    """A pool of as many calling threads as needed: no call waits for another, and idle threads are
    reused.

    Unlike a pool's, a hanging thread delays neither other calls nor the process's exit.

    Args:
        name: the threads' name, for stack traces.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[CallingThread] = []

    async def call(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; if this is cancelled, the call is abandoned."""
        thread = self._idle.pop() if self._idle else CallingThread(self._name)
        try:
            return await thread.heard(thread.submit(call))
        finally:
            self._idle.append(thread)


def _cuda_device() -> int | None:
    """Return the CUDA device of the current thread; a new thread would begin with device 0."""
    torch = sys.modules.get("torch")  # which worker processes do without
    return torch.cuda.current_device() if torch and torch.cuda.is_initialized() else None


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the call's result and None, or None and an error that is safe to re-raise."""
    try:
        return call(), None
    except BaseException as error:
        return None, storable(error)


def storable(error: BaseException) -> Exception:
    """Return the error if a future may hold it, else a substitute.

    A future cannot hold StopIteration, and errors that end a process, such as SystemExit, must not
    end another thread.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised {type(error).__name__}: {error}")
