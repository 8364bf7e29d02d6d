"""Samples of a run's first and last iterations, and the differences that chance explains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_rl.run.metrics import summarize

SMALL_EFFECT = 0.2
"""In standard deviations (Cohen 1988): a fall that is certain, but smaller, is not worth a word."""


@dataclass(frozen=True)
class Sample:
    """Mean and standard deviation of ``count`` independent values."""

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """From given values."""
        return cls(*summarize(list(values)), len(values))

    @classmethod
    def of_share(cls, share: float, count: int) -> "Sample":
        """From the share of ``count`` values that are 1, where the others are 0."""
        return cls(share, math.sqrt(share * (1 - share)), count)

    def lowest(self, later: "Sample", sigmas: float) -> float:
        """The lowest mean that a later sample may have by chance, or that is too little to matter.

        ``sigmas`` standard errors of the difference below this one's, sqrt(s1^2/n1 + s2^2/n2), and
        at least ``SMALL_EFFECT`` of its standard deviation.
        """
        error = math.hypot(self.spread / self.count**0.5, later.spread / later.count**0.5)
        return self.mean - max(sigmas * error, SMALL_EFFECT * self.spread)


class FirstAndLast:
    """The values of a run's first iterations, and of equally many last ones.

    Args:
        window: iterations at either end, at least.
        least: values at either end, at least.
    """

    def __init__(self, window: int, least: int = 1) -> None:
        self.window = window
        self.least = least
        self.first: list[list[float]] = []
        self.last: list[list[float]] = []

    def add(self, values: Sequence[float]) -> None:
        """Add those of the next iteration."""
        if not self._enough(self.first):
            self.first.append(list(values))
            return
        self.last.append(list(values))
        while self._enough(self.last[1:]):
            del self.last[0]

    def _enough(self, rows: list[list[float]]) -> bool:
        return len(rows) >= self.window and sum(map(len, rows)) >= self.least

    @property
    def full(self) -> bool:
        """True once both ends are complete; they never overlap."""
        return self._enough(self.last)

    @property
    def both(self) -> tuple[Sample, Sample]:
        """All values of either end."""
        return Sample.of(list(chain(*self.first))), Sample.of(list(chain(*self.last)))

    @property
    def iterations(self) -> tuple[int, int]:
        """Number of iterations at each end."""
        return len(self.first), len(self.last)

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        self.first, self.last = state["first"], state["last"]
