"""How the command's process ends: with the status that it earned, whatever hangs or exits in it."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_to_the_end(command: Callable[[], int]) -> int:
    """Call ``command``, and return its status, for this process to end with.

    Where a function that hangs was left behind, it ends here: Python would wait for what that has
    started. ``os._exit(0)`` before the command is done ends the process too, but with status 1.
    """
    leave = os._exit
    os._exit = _failing(leave)  # type: ignore[assignment]
    try:
        status = command()
    except BaseException as error:
        if _something_hangs():
            _leave(leave, _status_of(error))
        raise
    finally:
        os._exit = leave
    if _something_hangs():
        _leave(leave, status)
    return status


def _failing(leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    process = os.getpid()

    def exit_unfinished(status: int) -> NoReturn:
        if os.getpid() == process and status == 0:  # not one that was forked
            frame = sys._getframe(1)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            text = f"lightning-rl: os._exit(0) was called before the command was done, at {place}\n"
            os.write(2, text.encode())
            status = 1
        leave(status)

    return exit_unfinished


def _something_hangs() -> bool:
    threads = sys.modules.get("lightning_rl.collect.threads")  # which not all commands need
    return threads is not None and bool(threads.hanging_threads())


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    traceback.print_exception(error)
    return 1


def _leave(leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    atexit._run_exitfuncs()  # but no waiting for threads
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    leave(status)
