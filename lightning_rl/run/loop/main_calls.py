"""Calls that the main thread makes on behalf of coroutines while it waits."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from lightning_rl.errors import LightningRLError
from lightning_rl.run.loop.threads import storable


class MainCall:
    """A call, and the future in which a coroutine awaits its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call
        self._loop = asyncio.get_running_loop()

    def make(self) -> None:
        """Make the call in this thread; an exception that ends a thread, such as Ctrl-C, is also
        raised here.
        """
        if not self.future.set_running_or_notify_cancel():  # nobody waits any more
            return
        try:
            result = self._call()
        except Exception as error:
            self.future.set_exception(storable(error))
        except BaseException as error:
            kind = type(error).__name__
            self.future.set_exception(LightningRLError(f"the call was interrupted by {kind}"))
            raise
        else:
            self.future.set_result(result)

    def make_in_loop(self) -> None:
        """Have the call made in the thread of the event loop that it came from."""
        self._loop.call_soon_threadsafe(self.make)


class MainCalls:
    """An executor that works only while its thread waits, between ``open`` and ``close``.

    ``busy`` is True while a call is made. If a signal's exception ends ``serve`` early, the call
    stays queued, and ``close`` has its event loop make it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: dict[MainCall, None] = {}  # in their order
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self.is_open = False
        self.busy = False

    def open(self) -> None:
        """Accept calls from now on."""
        with self._lock:
            self.is_open = True

    def close(self) -> None:
        """Accept no more calls; queued ones are made by their event loops."""
        with self._lock:
            self.is_open = False
            left, self._queued = self._queued, {}
            self._wakeups = SimpleQueue()
        for call in left:
            call.make_in_loop()

    def submit(self, call: Callable[[], Any]) -> Future[Any] | None:
        """Queue a call; returns None if none are accepted."""
        with self._lock:
            if not self.is_open:
                return None
            queued = MainCall(call)
            self._queued[queued] = None
        self.wake()
        return queued.future

    def wake(self) -> None:
        """Make the present ``serve`` return."""
        self._wakeups.put(None)

    def serve(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds to be woken; make the queued call, if there is one."""
        try:
            self._wakeups.get(timeout=timeout)
        except Empty:
            return
        self.busy = True
        try:
            with self._lock:
                call = next(iter(self._queued), None)
                if call is None:
                    return
                del self._queued[call]
            call.make()
        finally:
            self.busy = False
