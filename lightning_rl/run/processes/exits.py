"""Keep code of others from ending the process in which it is called."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning_rl.run.loop.stacks import name_crashes
from lightning_rl.run.processes.keeper import die_with_parent

_SIGNALS = ("signal", "alarm", "setitimer")

_inside: ContextVar[int] = ContextVar("lightning_rl_inside", default=0)
"""The process that is calling code of others in this context; 0: none."""
_forking: ContextVar[int] = ContextVar("lightning_rl_forking")
"""The process that is forking."""
_called: ContextVar[bool] = ContextVar("lightning_rl_called", default=False)
"""True while a user's function is being called in this context."""


class EndsProcess(BaseException):
    """The called code used ``os._exit``, which would have ended the run, perhaps with status 0."""


class UsesSignals(BaseException):
    """The called code needs the main thread. Not an ``Exception``, as careful functions catch
    those.
    """


RAISED_BY_FUNCTIONS = (Exception, SystemExit, EndsProcess, UsesSignals)
"""Whatever a user's function may raise, besides cancellations and Ctrl-C."""


@contextmanager
def function_called_here() -> Iterator[None]:
    """Within the block, ``os._exit``, and signals outside the main thread, raise and do no harm."""
    _install_for_functions()
    me = os.getpid()
    token = _called.set(True)
    try:
        with no_exit():
            yield
    finally:
        _called.reset(token)
        if os.getpid() != me:  # a process that the function forked: what is here is not its to do
            os._exit(0)


@contextmanager
def no_exit() -> Iterator[None]:
    """Within the block, ``os._exit`` raises :class:`EndsProcess` in the code that is called."""
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


@functools.cache
def _install_for_functions() -> None:
    # Not for the time of a call either.
    for name in _SIGNALS:
        setattr(signal, name, _refuse_outside_main(getattr(signal, name)))
    os.register_at_fork(before=lambda: _forking.set(os.getpid()), after_in_child=_end_with_the_run)
    name_crashes()


def _end_with_the_run() -> None:
    if _called.get():
        die_with_parent()
        if os.getppid() != _forking.get():  # it was gone before the kernel was asked
            os._exit(1)


def _refuse_outside_main(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        if _called.get() and threading.current_thread() is not threading.main_thread():
            raise UsesSignals(f"signal.{function.__name__} works in the main thread only")
        return function(*arguments)

    return checked


def _refuse_exit(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def checked(status: int) -> None:
        if _inside.get() == os.getpid():  # a process that it forked may end as it likes
            raise EndsProcess(f"os._exit({status})")
        function(status)

    return checked
