"""What was saved in a run: which of it is best, and which of it stays."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_rl.errors import ConfigError

Ranked = list[tuple[float, str]]
"""Values of a metric with the names of what was saved then, best first."""


def ranked(best: Ranked, value: float | None, name: str, keep: int, mode: str) -> Ranked:
    """The best with one more, of which ``keep`` stay; the newest of equals does.

    A value that is not there, or not finite, is none of them.
    """
    if value is None or not math.isfinite(value):
        return best
    others = [old for old in best if old[1] != name]
    sign = -1 if mode == "max" else 1
    return sorted([(value, name), *others], key=lambda old: sign * old[0])[:keep]


def require_mode(mode: str) -> None:
    """Check that a mode is ``max`` or ``min``.

    Raises:
        ConfigError: naming the value.
    """
    if mode not in ("max", "min"):
        raise ConfigError(f"mode={mode!r} must be 'max' or 'min'")


class Retained(NamedTuple):
    """Names of what was saved, oldest first."""

    there: list[str]
    """In its directory: what is still being written replaces nothing yet."""
    best: list[str]
    """The best of that, in their order."""
    kept: set[str]
    """What stays of it: the last, and the best."""


def retained(directory: Path, saved: Sequence[str], best: Ranked, keep_last: int) -> Retained:
    """What of all that was saved is in a directory, and what of that stays there."""
    there = [name for name in saved if (directory / name).exists()]
    names = [name for _, name in best if name in there]
    return Retained(there, names, {*there[-keep_last:], *names})
