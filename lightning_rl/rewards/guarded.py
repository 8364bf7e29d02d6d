"""What a reward may not do where it is called: end the process, or set signals beside main."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_SIGNALS = ("signal", "alarm", "setitimer")

_inside: ContextVar[int] = ContextVar("lightning_rl_reward", default=0)
"""The process in which a reward is being called here; 0: in none."""


class UsesSignals(BaseException):
    """A reward needs the main thread. No Exception, as rewards catch those and score 0."""


class EndsProcess(BaseException):
    """A reward called ``os._exit``, which would have ended the run, and told success."""


@contextmanager
def reward_called_here() -> Iterator[None]:
    """While it lasts, the calls above raise instead of doing harm."""
    _install()
    token = _inside.set(os.getpid())
    try:
        yield
    finally:
        _inside.reset(token)


@functools.cache
def _install() -> None:
    # Not for the time of a call: one that never ends would never take it back.
    for name in _SIGNALS:
        setattr(signal, name, _only_in_main(getattr(signal, name)))
    os._exit = _never(os._exit)


def _only_in_main(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        if _inside.get() and threading.current_thread() is not threading.main_thread():
            raise UsesSignals(f"signal.{function.__name__} works in the main thread only")
        return function(*arguments)

    return checked


def _never(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def checked(status: int) -> None:
        if _inside.get() == os.getpid():  # a process that it forked may end as it likes
            raise EndsProcess(f"os._exit({status})")
        function(status)

    return checked
