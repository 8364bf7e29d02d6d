"""Prepare rows of GSM8K for the reward, and make problems of the same form to try it with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NAMES = ["Amara", "Ben", "Chen", "Dilara", "Elif", "Farid", "Greta", "Hugo"]
THINGS = ["apples", "books", "candles", "marbles", "pencils", "stamps", "tickets", "cookies"]


def short_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Keep the result of a row's worked solution, ``... #### 1,234``, in place of all of it."""
    solution, mark, result = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer {solution!r:.80} has no #### before its result")
    return row | {"answer": result.strip().replace(",", "")}


def problems(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows as GSM8K has them: two or three steps with whole numbers, in words."""
    rng = random.Random(seed)
    for _ in range(count):
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        first, times, given = rng.randint(12, 400), rng.randint(2, 9), rng.randint(1, 11)
        question = [f"{name} has {first} {thing} and buys {times} times as many."]
        bought = first * times
        steps = [f"{name} buys {first}*{times}=<<{first}*{times}={bought}>>{bought} {thing}."]
        total = first + bought
        steps.append(f"Together these are {first}+{bought}=<<{first}+{bought}={total}>>{total}.")
        if rng.random() < 0.5:
            question.append(f"Then {name} gives {given} of them away.")
            left = total - given
            steps.append(f"Then {total}-{given}=<<{total}-{given}={left}>>{left} are left.")
            total = left
        question.append(f"How many {thing} does {name} have now?")
        steps.append(f"#### {total:,}")
        yield {"question": " ".join(question), "answer": "\n".join(steps)}


def digit_share(completions: list[list[dict[str, Any]]]) -> list[float]:
    """Return the share of characters that are digits: random weights differ in nothing better."""
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]
