"""What a reward function may return for one completion: a number, or several under names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_REWARD = 1e6
"""Batches hold rewards in float32, which beyond this no longer tells differences of 0.1."""
WHOLE = "score"
"""The part that is the score, where a mapping has it."""

Number = float | None
PlainScore = Number | dict[str, Number] | list[Number]


def parts_of(name: str, score: Any) -> dict[str, Number]:
    """A score as ``name``, and where it has parts each of them as ``name/part``.

    The score of a mapping is its ``score``; without one, and of a list, it is the sum of the parts.
    Parts that are None are left out of the sum; where all are, the score is None.

    Raises:
        ValueError: for what is no number, not finite, or beyond ±1e6, naming the part.
    """
    plain = plain_score(score)
    if not isinstance(plain, dict | list):
        _require_fit(plain, f"{score!r:.200}")
        return {name: plain}
    parts = plain if isinstance(plain, dict) else {str(i): part for i, part in enumerate(plain)}
    if not parts:
        raise ValueError(f"returned {score!r}; a score of several parts needs one")
    applying = [part for part in parts.values() if part is not None]
    whole = parts.get(WHOLE, math.fsum(applying) if applying else None)
    for part, number in (*parts.items(), ("the sum", whole)):
        _require_fit(number, f"{score!r:.200} ({part}: {number})")
    return {name: whole} | {f"{name}/{part}": number for part, number in parts.items()}


def plain_score(score: Any) -> PlainScore:
    """The same as Python's own numbers, also numpy's and torch's.

    Raises:
        ValueError: for what is neither number nor numbers.
    """
    if isinstance(score, Mapping):
        return {str(part): _part(str(part), value, score) for part, value in score.items()}
    if hasattr(score, "tolist"):
        score = score.tolist()
    if isinstance(score, Sequence) and not isinstance(score, str | bytes):
        return [_part(str(place), value, score) for place, value in enumerate(score)]
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
            f"returned {told}; a score must be within ±1e6, so that float32 can tell it apart"
        )
