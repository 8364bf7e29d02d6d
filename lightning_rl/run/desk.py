"""A desk at which a thread that waits makes calls for others."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from lightning_rl.errors import LightningRLError
from lightning_rl.run.threads import ThreadFuture


class PendingCall(ThreadFuture):
    """A call whose result a coroutine waits for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def make(self) -> None:
        """Make it in this thread; what ends a thread, such as Ctrl-C, is raised here, too."""
        if self.settled:  # nobody waits any more
            return
        try:
            result = self._call()
        except Exception as error:
            self.give(None, error)
        except BaseException as error:
            kind = type(error).__name__
            self.give(None, LightningRLError(f"the call was broken off by {kind}"))
            raise
        else:
            self.give(result, None)

    def give_back(self) -> None:
        """Have it made in the loop's own thread."""
        self.loop.call_soon_threadsafe(self.make)


class Desk:
    """One thread opens it, serves and closes it; coroutines of any loop hand calls in.

    ``is_open`` while it takes calls, ``busy`` while one is made. Where an exception breaks a
    service off before, by a signal at any place, the call still lies on the desk, and ``close``
    gives it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_open = False
        self._calls: dict[PendingCall, None] = {}  # in their order
        self._bell: SimpleQueue[None] = SimpleQueue()
        self.busy = False

    def open(self) -> None:
        """Take calls from now on."""
        with self._lock:
            self.is_open = True

    def close(self) -> None:
        """Take no more; those that nobody has begun with are made by their loops."""
        with self._lock:
            self.is_open = False
            left, self._calls = self._calls, {}
            self._bell = SimpleQueue()
        for call in left:
            call.give_back()

    def hand_in(self, call: Callable[[], Any]) -> PendingCall | None:
        """Have a call made; None where nobody serves."""
        with self._lock:
            if not self.is_open:
                return None
            handed = PendingCall(call)
            self._calls[handed] = None
        self.ring()
        return handed

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
