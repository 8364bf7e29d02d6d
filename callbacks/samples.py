"""Samples of a run's first and last iterations, and which differences chance explains."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from lightning_rl.run.files.metrics import summarize

SMALL_EFFECT = 0.2
"""In standard deviations (Cohen 1988): a significant but smaller fall is not reported."""


@dataclass(frozen=True)
class Sample:
    """Mean and standard deviation of ``count`` independent values."""

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Return the sample of the given values."""
        return cls(*summarize(list(values)), len(values))

    @classmethod
    def of_share(cls, share: float, count: int) -> "Sample":
        """Return the sample of ``count`` values of which ``share`` are 1 and the others 0."""
        return cls(share, math.sqrt(share * (1 - share)), count)

    def lowest(self, later: "Sample", sigmas: float) -> float:
        """Return the lowest mean of a later sample that is not a significant and relevant fall.

        It is ``sigmas`` standard errors of the difference, sqrt(s1^2/n1 + s2^2/n2), below this
        one's, and at least ``SMALL_EFFECT`` of its standard deviation.
        """
        error = math.hypot(self.spread / self.count**0.5, later.spread / later.count**0.5)
        return self.mean - max(sigmas * error, SMALL_EFFECT * self.spread)


class Stateful:
    """Keeps the attributes named in ``state_names``: primitives, or objects with a state."""

    state_names: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as primitives."""
        kept = {name: getattr(self, name) for name in self.state_names}
        return {n: v.state_dict() if isinstance(v, Stateful) else v for n, v in kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        for name in self.state_names:
            if isinstance(own := getattr(self, name), Stateful):
                own.load_state_dict(state_dict[name])
            else:
                setattr(self, name, state_dict[name])


class FirstAndLast(Stateful):
    """The values of a run's first iterations, and of equally many last ones.

    Args:
        window: least number of iterations at either end.
        least: least number of values at either end.
    """

    state_names: ClassVar[tuple[str, ...]] = ("first", "last")

    def __init__(self, window: int, least: int = 1) -> None:
        self.window = window
        self.least = least
        self.first: list[list[float]] = []
        self.last: list[list[float]] = []

    def add(self, values: Sequence[float]) -> None:
        """Add the values of the next iteration."""
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
        """All values of the first iterations, and of the last."""
        return Sample.of(list(chain(*self.first))), Sample.of(list(chain(*self.last)))

    @property
    def iterations(self) -> tuple[int, int]:
        """Number of iterations at each end."""
        return len(self.first), len(self.last)


class Scores(FirstAndLast):
    """Means of the scores of groups, and how far apart scores have been."""

    state_names: ClassVar[tuple[str, ...]] = ("first", "last", "range")

    def __init__(self, window: int, least: int = 1) -> None:
        super().__init__(window, least)
        self.range = [math.inf, -math.inf]
        """The lowest and the highest score of a rollout."""

    def add_groups(self, groups: Collection[Sequence[float]]) -> None:
        """Add the scores of the next iteration, group by group."""
        self.add([sum(group) / len(group) for group in groups])
        scores = list(chain(*groups))
        self.range = [min(self.range[0], *scores), max(self.range[1], *scores)]
