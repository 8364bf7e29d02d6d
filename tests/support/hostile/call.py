"""Define a hostile call: what is done, and what has to come of it."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lightning_rl.cli import main
from lightning_rl.errors import LightningRLError


@dataclass(frozen=True)
class Call:
    """One call, played in a process of its own that stands in a new, empty folder.

    It has to fail: with a status other than 0, all of ``says`` in what it printed, and no
    traceback. With ``right`` it has to go well, with status 0 and ``says``.
    """

    name: str
    """The fault in words; unique in its surface."""
    play: Callable[[Path], object]
    """Does it; gets the folder. An error of the library, if raised, is printed in one line and
    counts as a failure that was told; ``SystemExit`` sets the status."""
    says: tuple[str, ...]
    right: bool = False
    seconds: float = 60.0
    """After which it hangs; generous, as machines differ."""

    def run(self, folder: Path) -> int:
        """Play it here; the status it ends with."""
        try:
            self.play(folder)
        except LightningRLError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return 0


def play(surface: str, name: str) -> None:
    """Play a call of a surface where this process stands."""
    os.setsid()  # whatever it forks is known by its session
    calls = {call.name: call for call in import_module(f"{__package__}.{surface}").CALLS}
    sys.exit(calls[name].run(Path.cwd()))


def command(*arguments: str) -> Callable[[Path], object]:
    """Run ``lightning-rl arguments``; ``{folder}`` in them is the call's folder."""

    def play(folder: Path) -> None:
        status = main([argument.replace("{folder}", str(folder)) for argument in arguments])
        if status:
            sys.exit(status)

    return play
