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

    ``busy`` while a call is made. Where an exception breaks a service off before, by a signal at
    any place, the call still lies on the desk, and ``close`` gives it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._calls: dict[_Call, None] = {}  # in their order
        self._bell: SimpleQueue[None] = SimpleQueue()
        self.busy = False

    def open(self) -> None:
        """Take calls from now on."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Take no more; those that nobody has begun with are made by their loops."""
        with self._lock:
            self._is_open = False
            left, self._calls = self._calls, {}
            self._bell = SimpleQueue()
        for call in left:
            call.give_back()

    def hand_in(self, call: Callable[[], T]) -> asyncio.Future[T] | None:
        """Have a call made; None where nobody serves."""
        with self._lock:
            if not self._is_open:
                return None
            handed = _Call(call)
            self._calls[handed] = None
        self.ring()
        return handed.done

    def ring(self) -> None:
        """Let whoever serves look up."""
        self._bell.put(None)

    def serve(self, timeout: float) -> None:
        """Wait so many seconds for a ring, and make a call, if there is one."""
        try:
            self._bell.get(timeout=timeout)
        except Empty:
            return
        self.busy = True
        try:
            with self._lock:
                call = next(iter(self._calls), None)
                if call is None:
                    return
                del self._calls[call]
            call.make()
        finally:
            self.busy = False
