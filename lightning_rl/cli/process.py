"""The command's process: it hides messages that users cannot act on, and sets the exit status."""

import argparse
import atexit
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning_rl.errors import ConfigError
from lightning_rl.run.known_warnings import ignore_known_warnings

_UNPRINTABLE = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    127: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),  # turn text round
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # halves of a pair have no UTF-8
}


def printable(text: str) -> str:
    """Replace control characters, such as ESC, which a terminal would interpret: a model may write
    them.
    """
    return text.translate(_UNPRINTABLE)


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration, such as ``90s``, ``20m``, ``2h`` or ``1h30m``.

    Raises:
        ConfigError: naming the option, if the text has another form or is not above 0.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if text != "".join(number + unit for number, unit in parts) or not 0 < seconds < math.inf:
        raise ConfigError(
            f"{option}={text!r} must be a duration above 0: numbers with s, m, h or d, such as "
            "90s, 20m, 2h or 1h30m"
        )
    return seconds


def duration(seconds: float) -> str:
    """Return a rounded duration for people, such as ``95 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class CommandParser(argparse.ArgumentParser):
    """Parser of the options of ``lightning-rl <command>``; it raises mistakes as ConfigError."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"lightning-rl {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
        )

    def add_trust(self) -> None:
        """Add the options by which only trusted code builds a recorded run."""
        only = "build the run from this library's code only"
        self.add_argument("--trusted_only", action="store_true", help=only)
        also = "and from this module's code"
        self.add_argument("--trust", metavar="MODULE", action="append", default=[], help=also)

    @staticmethod
    def trust_in(parsed: argparse.Namespace) -> list[str]:
        """Return these options as the command line of a run's parts has them."""
        return ["--trusted_only"] * parsed.trusted_only + [f"--trust={m}" for m in parsed.trust]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


@contextmanager
def quiet() -> Iterator[None]:
    """Filter warnings, tips and progress bars of the libraries; real warnings stay."""
    lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lightning.addFilter(_no_tips)
    from transformers.utils import logging as transformers_logging

    # "Loading weights" and "Writing model shards" bars, of a model that is there in a second.
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        ignore_known_warnings()
        try:
            yield
        finally:
            lightning.removeFilter(_no_tips)
            transformers_logging.enable_progress_bar()


def _no_tips(record: logging.LogRecord) -> bool:
    """Drop Lightning's advertisements for its own services."""
    return "Tip: For seamless cloud" not in record.getMessage()


def run_to_the_end(command: Callable[[], int]) -> int:
    """Call ``command``, and return its status, with which this process should end.

    If a hanging function was abandoned, the process ends here: Python would wait for the threads
    that it has started. ``os._exit(0)`` before the command is done ends the process too, but with
    status 1.
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
    threads = sys.modules.get("lightning_rl.run.loop.threads")  # which not all commands need
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
