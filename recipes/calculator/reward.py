"""Reward answers in the calculator recipe."""

from __future__ import annotations

from typing import Any


def right_answer(
    completions: list[list[dict[str, Any]]], answer: list[str], finish_reasons: list[str | None]
) -> list[float]:
    """Return 1.0 where the last message is the answer and the model ended it by itself, else 0.0.

    It does not look at how the model came by the answer.
    """
    rows = zip(completions, answer, finish_reasons, strict=True)
    return [
        float(messages[-1]["content"] == expected and finish == "stop")
        for messages, expected, finish in rows
    ]
