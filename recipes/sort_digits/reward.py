"""Reward answers in the sort-digits recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[str],
    finish_reasons: Sequence[str | None],
    **columns: Any,
) -> list[float]:
    """Return 1.0 where a completion is the answer and ended by itself, else 0.0, for each row.

    `finish_reasons` must be "stop": a right answer that was cut off at the token limit, before
    the end token, is not finished. `columns` takes the data set's other columns, unused here.
    Raises ValueError if the lists differ in length.
    """
    rows = zip(prompts, completions, answer, finish_reasons, strict=True)
    return [
        float(completion == expected and finish == "stop")
        for _, completion, expected, finish in rows
    ]
