"""Watch: calls a collector in a thread that can be abandoned if it hangs."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning_rl.envs.collector import EnvCollector, EnvError, raised
from lightning_rl.run.loop.background import wait
from lightning_rl.run.loop.stacks import where_thread_is
from lightning_rl.run.loop.threads import CallingThread
from lightning_rl.run.processes.exits import no_exit

_log = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 300.0
"""Time limit for environments to start, on a busy machine."""
END_S = 5.0
"""Time limit for environments to end by themselves."""
_PAUSE_S = 1.0
"""Time limit for a step to end once nobody waits for it any more."""
_LATE_S = 0.5
"""Extra time, since a collector that watches its own processes reports hanging more precisely."""


class Watch:
    """Calls a collector in its own thread, while the calling thread waits.

    So signals, ``Watchdog`` and ``max_step_seconds`` can end a collection whose environment hangs.
    All calls are made in the same thread, as windows and simulators require; an abandoned collector
    is not called again until it is restarted.

    Args:
        collector: the collector to call.
        name: name of the environments, for messages.
    """

    def __init__(self, collector: EnvCollector, name: str) -> None:
        self.collector = collector
        self.name = name
        self._thread = CallingThread("environments")
        self._is_lost = False

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        """Start the collector's environments.

        Raises:
            ConfigError: if they cannot be created.
            EnvError: for any other exception of theirs.
        """
        self._is_lost = False
        self._call(lambda: self.collector.start(seed, first, num_envs), START_S)

    def __call__(
        self, call: Callable[[], T], within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> T:
        """Return the result of a call to the collector, such as a batch.

        Args:
            call: the call.
            within: a thread-local context for it, such as autocast.

        Raises:
            EnvError: if an environment raises, or exceeds its time limit.
        """

        def called() -> T:
            with within():
                return call()

        return self._call(called, None)

    def hanging(self) -> tuple[str, threading.Thread] | None:
        """Return what is being stepped right now, and in which thread."""
        thread = self._thread.thread
        if thread is None:
            return None
        where = self.collector.where()
        return (f"{self.name} ({where})" if where else self.name), thread

    def close(self) -> None:
        """Close the environments; errors are logged and do not end the run."""
        if self._is_lost:
            return
        try:
            self._call(self.collector.close, END_S)
        except EnvError as error:
            _log.warning("environments cannot be closed: %s", error)
        self._thread.close()

    def _call(self, call: Callable[[], T], seconds: float | None) -> T:
        ended = threading.Event()
        deadline = self.collector.deadline

        def made() -> T:
            try:
                with no_exit():
                    return call()
            except BaseException as error:
                raise raised(self.name, "", error) from error
            finally:
                ended.set()

        if deadline is not None:
            deadline.begin(seconds)
        future = self._thread.submit(made)
        try:
            return wait(future, None if deadline is None else lambda: deadline.left + _LATE_S)
        except TimeoutError:
            assert deadline is not None
            error = deadline.expired(self._place())
            self._break_off(future, ended)
            raise error from None
        except BaseException:
            self._break_off(future, ended)
            raise

    def _break_off(self, future: Future[Any], ended: threading.Event) -> None:
        """Let the call end with the current step; if that never ends, abandon the thread."""
        if ended.is_set():
            return
        if self.collector.deadline is not None:
            self.collector.deadline.break_off()
        if not ended.wait(_PAUSE_S):
            self._is_lost = True
            self._thread.abandon(future)
            self.collector.abandon()

    def _place(self) -> str:
        """Describe which environment is being stepped, and the line of code that it has reached."""
        thread = self._thread.thread
        line = "" if thread is None else f"it hangs at {where_thread_is(thread)}"
        return ", ".join(part for part in (self.collector.where(), line) if part)
