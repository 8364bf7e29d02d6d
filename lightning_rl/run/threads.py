"""Calling what may block or hang, in threads that can be left behind; and where threads are."""

import asyncio
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

_left_behind: list[threading.Thread] = []


def leave_behind(thread: threading.Thread) -> None:
    """Remember a thread that nobody waits for any more, as what it calls may never end."""
    _left_behind[:] = [*hanging_threads(), thread]


def hanging_threads() -> list[threading.Thread]:
    """List those that were left behind, and still run."""
    return [thread for thread in _left_behind if thread.is_alive()]


class CallingThread:
    """A daemon thread for one call after another, which is replaced if one never ends.

    A hop there and back takes some 30 µs. The thread starts with the first call.

    Args:
        name: of the thread, for stacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: Future[Any] | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call, for its result; raises as :func:`in_daemon_thread` does.

        It can be cancelled at any time, also while the call runs, which goes on unheard.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.put((future, call))
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._start()
        return future

    async def heard(self, future: Future[Any]) -> Any:
        """The result of a call that was submitted; it is abandoned where nobody waits any more."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

    def abandon(self, future: Future[Any]) -> None:
        """Wait no more for this call; if it runs, those after it get another thread."""
        future.cancel()
        with self._lock:
            if self._current is future and self._thread is not None:
                leave_behind(self._thread)
                self._start()

    def abandon_current(self) -> threading.Thread | None:
        """Wait no more for the call that runs, if there is one; returns its thread."""
        with self._lock:
            current, thread = self._current, self._thread
        if current is None:
            return None
        self.abandon(current)
        return thread

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, if it is in the middle of a call."""
        with self._lock:
            return None if self._current is None else self._thread

    def _start(self) -> None:
        self._current = None
        arguments = (_cuda_device(),)
        self._thread = threading.Thread(
            target=self._work, args=arguments, name=self._name, daemon=True
        )
        self._thread.start()

    def _work(self, device: int | None) -> None:
        if device is not None:
            sys.modules["torch"].cuda.set_device(device)
        while True:
            future, call = self._waiting.get()
            if not self._take(future):
                continue
            result, error = _outcome(call)
            with self._lock:
                mine = self._current is future
                if mine:
                    self._current = None
            # Cancelled a moment ago, perhaps.
            with suppress(InvalidStateError):
                future.set_result(result) if error is None else future.set_exception(error)
            if not mine:
                return  # another thread has taken over

    def _take(self, future: Future[Any]) -> bool:
        with self._lock:
            if future.cancelled():
                return False
            self._current = future
            return True


class CallingThreads:
    """As many as have to be: a call never waits for another, and an idle thread takes the next.

    Args:
        name: of the threads, for stacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[CallingThread] = []

    async def call(self, call: Callable[[], Any]) -> Any:
        """The result of a call; it is abandoned where nobody waits any more."""
        thread = self._idle.pop() if self._idle else CallingThread(self._name)
        try:
            return await thread.heard(thread.submit(call))
        finally:
            self._idle.append(thread)


def _cuda_device() -> int | None:
    """The device of the current thread; a new one would begin with device 0."""
    torch = sys.modules.get("torch")  # which worker processes do without
    return torch.cuda.current_device() if torch and torch.cuda.is_initialized() else None


class ThreadFuture:
    """What another thread has to tell a coroutine, in whose loop it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[tuple[Any, Exception | None]] = self.loop.create_future()

    @property
    def settled(self) -> bool:
        """Whether it was given, or nobody waits for it any more."""
        return self._outcome.done()

    def give(self, result: Any, error: Exception | None) -> None:
        """Tell it, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, result, error)

    async def heard(self) -> Any:
        """The result, once it is given; or raises the error."""
        result, error = await self._outcome
        if error is not None:
            raise error
        return result

    def _settle(self, result: Any, error: Exception | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result((result, error))


async def in_daemon_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call in a daemon thread: unlike a pool's, one that hangs delays neither others nor exit.

    Raises:
        RuntimeError: instead of what would end the process, such as SystemExit.
    """
    answer = ThreadFuture()

    def work() -> None:
        answer.give(*_outcome(lambda: function(**arguments)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        return await answer.heard()
    except asyncio.CancelledError:
        leave_behind(thread)
        raise


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Call, and return the result, or an error that ends neither a thread nor a coroutine."""
    try:
        return call(), None
    except Exception as error:
        if not isinstance(error, StopIteration):  # which no future may hold
            return None, error
        failure = RuntimeError("it raised StopIteration")
    except BaseException as error:
        failure = RuntimeError(f"it raised {type(error).__name__}: {error}")
    return None, failure


Place = tuple[str, int, str]
"""File, line and function."""

_STANDARD = sysconfig.get_path("stdlib")


def describe(loop: asyncio.AbstractEventLoop) -> str:
    """The stacks of all threads, then what the loop's tasks await, those that are alike counted."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    for chain, count in Counter(chains(loop)).most_common():
        parts.append(f"{count} tasks that await:\n" + "".join(f"  {tell(p)}\n" for p in chain))
    return "\n".join(parts)


def where_tasks_wait(loop: asyncio.AbstractEventLoop) -> str:
    """The place where most tasks of a loop wait."""
    places = Counter(innermost(chain) for chain in chains(loop) if chain)
    return places.most_common(1)[0][0] if places else "no task at all"


def where_thread_is(thread: threading.Thread) -> str:
    """The place that a thread has reached."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "the end of its thread"
    return innermost([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack(frame)])


def innermost(stack: Sequence[Place]) -> str:
    """The last place outside of the standard library, and how this package got there."""
    places = [place for place in stack if not _is_standard(place)] or list(stack)
    own = [place for place in places if "lightning_rl" in Path(place[0]).parts]
    reached = f" (called by {tell(own[-1])})" if own and own[-1] != places[-1] else ""
    return tell(places[-1]) + reached


def _is_standard(place: Place) -> bool:
    file = place[0]
    return file.startswith(("<frozen", _STANDARD)) and "site-packages" not in file


def chains(loop: asyncio.AbstractEventLoop) -> list[tuple[Place, ...]]:
    """List, for each task, the places from its own coroutine to the innermost that it awaits."""
    return [_chain(task.get_coro()) for task in asyncio.all_tasks(loop)]


def _chain(coroutine: Any) -> tuple[Place, ...]:
    places: list[Place] = []
    while coroutine is not None:
        # Of a coroutine, a generator or an asynchronous generator; else it is a future, the end.
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(coroutine, f"{k}_frame")), None)
        frame = kind and getattr(coroutine, f"{kind}_frame")
        if not frame:
            break
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        awaited = "gi_yieldfrom" if kind == "gi" else f"{kind}_await"
        coroutine = getattr(coroutine, awaited)
    return tuple(places)


def tell(place: Place) -> str:
    """``directory/file.py:12 in function``."""
    file, line, function = place
    return f"{'/'.join(Path(file).parts[-2:])}:{line} in {function}"
