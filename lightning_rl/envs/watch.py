"""Watch: calls what steps environments in a thread, from which one that hangs is left behind."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning_rl.envs.collector import EnvCollector, EnvError, raised
from lightning_rl.run.exits import no_exit
from lightning_rl.run.loop import wait
from lightning_rl.run.stacks import where_thread_is
from lightning_rl.run.threads import CallingThread

_log = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 300.0
"""How long environments may take to start, on a busy machine."""
END_S = 5.0
"""How long they may take to end by themselves."""
_PAUSE_S = 1.0
"""How long a step may take to come to its end, once nobody waits for it any more."""
_LATE_S = 0.5
"""A collector that watches its own processes knows better what hangs, and speaks first."""


class Watch:
    """Has a collector called in a thread of its own, while the calling thread waits.

    So signals, ``Watchdog`` and ``max_step_seconds`` end a collection whose environment hangs. All
    calls are made in the same thread, as windows and simulators want it; one that was left behind
    is not called again until it is started anew.

    Args:
        collector: what is called.
        name: the environments, for messages.
    """

    def __init__(self, collector: EnvCollector, name: str) -> None:
        self.collector = collector
        self.name = name
        self._thread = CallingThread("environments")
        self._is_lost = False

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        """Start the collector's environments.

        Raises:
            ConfigError: if they cannot be made.
            EnvError: for whatever else they raise.
        """
        self._is_lost = False
        self._call(lambda: self.collector.start(seed, first, num_envs), START_S)

    def __call__(
        self, call: Callable[[], T], within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> T:
        """What a call of the collector returns, such as a batch.

        Args:
            call: of the collector.
            within: a context for it that is a thread's own, such as autocast.

        Raises:
            EnvError: if an environment raises, or takes longer than its time limit.
        """

        def called() -> T:
            with within():
                return call()

        return self._call(called, None)

    def hanging(self) -> tuple[str, threading.Thread] | None:
        """What is being stepped right now, and the thread in which it is."""
        thread = self._thread.thread
        return None if thread is None else (f"{self.name}{self._which()}", thread)

    def close(self) -> None:
        """Let go of the environments; what goes wrong with that is told, and ends no run."""
        if self._is_lost:
            return
        try:
            self._call(self.collector.close, END_S)
        except EnvError as error:
            _log.warning("environments are left as they are, as they cannot be closed: %s", error)

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
        """Let the call end with the step at hand; if that never ends, leave all of it behind."""
        if ended.is_set():
            return
        if self.collector.deadline is not None:
            self.collector.deadline.break_off()
        if not ended.wait(_PAUSE_S):
            self._is_lost = True
            self._thread.abandon(future)
            self.collector.abandon()

    def _place(self) -> str:
        """Which environment is being stepped, and the line of code that it has reached."""
        thread = self._thread.thread
        line = "" if thread is None else f"it hangs at {where_thread_is(thread)}"
        return ", ".join(part for part in (self.collector.where(), line) if part)

    def _which(self) -> str:
        where = self.collector.where()
        return f" ({where})" if where else ""
