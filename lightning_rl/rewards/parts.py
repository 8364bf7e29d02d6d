"""Scores that a reward function may return for one completion: a number, or several with names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_REWARD = 1e6
"""Largest reward: batches hold float32, which cannot resolve differences of 0.1 beyond it."""
WHOLE = "score"
"""The key of the part that is the score itself, if a mapping has one."""

Number = float | None
PlainScore = Number | dict[str, Number] | list[Number]


def parts_of(name: str, score: Any) -> dict[str, Number]:
    """Return a score as ``name``, and each of its parts, if any, as ``name/part``.

    The score of a mapping is its ``score``; that of a list, or of a mapping without one, is the sum
    of the parts. The sum ignores parts that are None; if all are, the score is None.

    Raises:
        ValueError: for a part that is not a number, not finite, or beyond ±1e6; names the part.
            Also for a part called ``reward`` beside others without ``score``: it may be the total.
    """
    plain = plain_score(score)
    if not isinstance(plain, dict | list):
        _require_fit(plain, f"{score!r:.200}")
        return {name: plain}
    parts = plain if isinstance(plain, dict) else {str(i): part for i, part in enumerate(plain)}
    if "reward" in parts and WHOLE not in parts and len(parts) > 1:
        raise ValueError(
            f"returned {score!r:.200}; a mapping is summed unless it has a {WHOLE!r}: rename "
            f"'reward' to {WHOLE!r} if it is the total, or to another name if it is a part"
        )
    if not parts:
        raise ValueError(f"returned {score!r}; a list or mapping must have at least one score")
    applying = [part for part in parts.values() if part is not None]
    whole = parts.get(WHOLE, math.fsum(applying) if applying else None)
    for part, number in (*parts.items(), ("the sum", whole)):
        _require_fit(number, f"{score!r:.200} ({part}: {number})")
    return {name: whole} | {f"{name}/{part}": number for part, number in parts.items()}


def plain_score(score: Any) -> PlainScore:
    """Convert a score, which may be numpy's or torch's, to plain Python numbers.

    Raises:
        ValueError: if it is neither a number nor a collection of numbers.
    """
    if isinstance(score, Mapping):
        return {str(part): _part(str(part), value, score) for part, value in score.items()}
    if hasattr(score, "tolist"):
        score = score.tolist()
    if isinstance(score, Sequence) and not isinstance(score, str | bytes):
        return [_part(str(index), value, score) for index, value in enumerate(score)]
    return _number(score, f"{score!r:.200}")


def _part(part: str, value: Any, score: Any) -> Number:
    try:
        return _number(value, f"{score!r:.200} ({part})")
    except ValueError as error:
        raise ValueError(f"{error}; keep texts with log_extra") from None


def _number(value: Any, told: str) -> Number:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"returned {told}; a score must be a finite number or None") from None


def _require_fit(number: Number, told: str) -> None:
    if number is None:
        return
    if not math.isfinite(number):
        raise ValueError(f"returned {told}; a score must be a finite number or None")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(
            f"returned {told}; a score must be within ±1e6, beyond which float32 is too coarse; "
            "scale it"
        )
