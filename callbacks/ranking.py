"""Which checkpoints or exports of a run are the best, and which are kept."""

import math
from collections.abc import Sequence
from pathlib import Path

from lightning_rl.errors import ConfigError

Ranked = list[tuple[float, str]]
"""Values of a metric with the names of what was saved then, best first."""


def ranked(best: Ranked, value: float | None, name: str, keep: int, mode: str) -> Ranked:
    """Return the best with one more, at most ``keep``; among equals the newest stays.

    A value that is None or not finite is not ranked.
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


def retained(
    directory: Path, saved: Sequence[str], best: Ranked, keep_last: int
) -> tuple[list[str], list[str], set[str]]:
    """Return which of the saved names exist in a directory, which of the best, and all to keep.

    One that is still being written does not exist, and replaces nothing yet. The best are in their
    order; one that is in another directory has its path.
    """
    there = [name for name in saved if (directory / name).exists()]
    names = [name for _, name in best if (directory / name).exists()]
    return there, names, {*there[-keep_last:], *names}
