"""Reward answers in the vision recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_rl.rollout import last_text


def exact_answer(
    completions: Sequence[Any],
    answer: Sequence[str],
    finish_reasons: Sequence[str | None],
    **columns: Any,
) -> list[float]:
    """Return 1.0 where a completion is the answer and ended by itself, else 0.0, for each row."""
    return [
        float(last_text(completion) == expected and finish == "stop")
        for completion, expected, finish in zip(completions, answer, finish_reasons, strict=True)
    ]
