"""A desk at which a thread that waits makes calls for others."""

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lightning_rl.errors import LightningRLError

T = TypeVar("T")


class _Call:
    """A call that a coroutine waits for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()

    def make(self) -> None:
        """Make it in this thread; what ends a thread, such as Ctrl-C, is raised here, too."""
        if self.done.done():  # nobody waits any more
            return
        result, error = None, None
        try:
            result = self._call()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = LightningRLError(f"the call was broken off by {type(raised).__name__}")
            raise
        finally:
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def give_back(self) -> None:
        """Have it made in the loop's own thread."""
        self._loop.call_soon_threadsafe(self.make)

    def _settle(self, result: Any, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(error)


class Desk:
    """One thread opens it, serves and closes it; coroutines of any loop hand calls in.

    ``busy`` while it makes a call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.busy = False

    def open(self) -> None:
        """Take calls from now on."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Take no more; those that nobody has begun with are made by their loops."""
        with self._lock:
            self._is_open = False
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call.give_back()

    def hand_in(self, call: Callable[[], T]) -> asyncio.Future[T] | None:
        """Have a call made; None where nobody serves."""
        with self._lock:
            if not self._is_open:
                return None
            handed = _Call(call)
            self._calls.put(handed)
            return handed.done

    def ring(self) -> None:
        """Let whoever serves look whether there is still something to wait for."""
        self._calls.put(None)

    def serve(self, timeout: float) -> bool:
        """Make the next call, if one comes within so many seconds; returns whether one did."""
        try:
            call = self._calls.get(timeout=timeout)
        except Empty:
            return False
        if call is None:
            return False
        self.busy = True
        try:
            call.make()
        finally:
            self.busy = False
        return True
