"""Suspicions: causes that may have begun with an iteration, and the batches that show them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.rollout import as_text

CALM = 3
"""Iterations without it that a signature needs before its onset."""
LOOK_BACK = 4
"""Iterations before the last good version in which an onset is looked for."""


class Cause(Enum):
    """Classes of causes."""

    RATE = "learning rate"
    CREDIT = "advantages against the rewards"
    OUTLIER = "outlier advantage"
    PATTERN = "reward paid a pattern"
    RANGE = "a reward out of its range"
    SET = "one prompt set"
    ANSWER = "a corrupted answer"
    STALE = "stale weights"
    GAP = "engine gap"


Batches = Mapping[int, Sequence[Seen]]
"""The rollouts of each iteration, as its update saw them."""


@dataclass(frozen=True)
class Suspicion:
    """A cause that may have begun with iteration ``onset``; the last that shows it is ``last``.

    ``rollouts`` are the ids of those that show it; for a learning rate there are none, but ``cap``
    is the highest before. ``part`` is a part of the reward that paid nothing before.
    """

    cause: Cause
    onset: int
    last: int
    text: str
    rollouts: tuple[str, ...] = ()
    cap: float | None = None
    part: str | None = None


def span(
    values: Mapping[int, float], bound: Callable[[list[float]], float], first: int
) -> tuple[int, int] | None:
    """Return the first iterations in a row, from ``first`` on, whose values exceed the bound.

    ``bound`` is given the values of all iterations before the onset.
    """
    before: list[float] = []
    for number in sorted(values):
        if number >= first and len(before) >= CALM and values[number] > bound(before):
            last = number
            while values.get(last + 1, -inf) > bound(before):
                last += 1
            return number, last
        before.append(values[number])
    return None


def named(
    batches: Batches, found: tuple[int, int], shows: Callable[[Seen], bool]
) -> tuple[str, ...]:
    within = (seen for v in range(found[0], found[1] + 1) for seen in batches.get(v, ()))
    return tuple(seen.rollout.id for seen in within if shows(seen))


def answer_of(seen: Seen) -> tuple[str, str]:
    """Return the prompt and the answer of a rollout."""
    return seen.rollout.prompt.key, as_text(seen.rollout.completion)
