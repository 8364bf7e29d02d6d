"""Code of others that must not end the process in which it is called."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_inside: ContextVar[int] = ContextVar("lightning_rl_inside", default=0)
"""The process in which code of others is being called here; 0: in none."""


class EndsProcess(BaseException):
    """It called ``os._exit``, which would have ended the run, and perhaps told success."""


@contextmanager
def no_exit() -> Iterator[None]:
    """While it lasts, ``os._exit`` raises :class:`EndsProcess` in what is called here."""
    _install()
    token = _inside.set(os.getpid())
    try:
        yield
    finally:
        _inside.reset(token)


@functools.cache
def _install() -> None:
    # Not for the time of a call: one that never ends would never take it back.
    os._exit = _refuse_exit(os._exit)


def _refuse_exit(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def checked(status: int) -> None:
        if _inside.get() == os.getpid():  # a process that it forked may end as it likes
            raise EndsProcess(f"os._exit({status})")
        function(status)

    return checked
