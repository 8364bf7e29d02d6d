"""A comparison: rounds of one run per configuration, until every question is decided."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from lightning_rl.cli.compare.intervals import Interval
from lightning_rl.cli.compare.outcomes import FinalValue, Outcome
from lightning_rl.cli.compare.runs import BudgetSpent, Runs
from lightning_rl.cli.process import duration

ERROR = 0.05
"""The probability that any interval of a comparison ever misses."""


def order_of(names: Sequence[str], seed: int) -> list[str]:
    """Return the order of a round's runs: A B, then B A, then A B, so that a machine that becomes
    slower, or faster, affects all alike.
    """
    return list(names) if seed % 2 == 0 else list(reversed(names))


@dataclass
class Comparison:
    """Compares each of ``others`` with ``base``, whose runs have the same seeds 0, 1, 2, ....

    A configuration that is decided is not trained any more.
    """

    base: str
    others: Sequence[str]
    question: FinalValue
    runs: Runs
    _read: dict[tuple[str, int], Outcome] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The share of one interval in ``ERROR``, which is divided evenly (Bonferroni)."""
        return ERROR / len(self.others)

    def outcome(self, name: str, seed: int) -> Outcome:
        """Return the outcome of a run that has ended; see :meth:`FinalValue.answered_by`."""
        if (name, seed) not in self._read:
            self._read[name, seed] = self.question.answered_by(self.runs.directory(name, seed))
        return self._read[name, seed]

    def seeds_of(self, name: str) -> list[int]:
        """Return the seeds of a configuration's runs that have ended."""
        return sorted(seed for of, seed in self.runs.seconds if of == name)

    def differences(self, other: str) -> list[float]:
        """Return the differences of all pairs, in the order of their seeds."""
        seeds = [seed for seed in self.seeds_of(other) if seed in self.seeds_of(self.base)]
        pairs = ((self.outcome(self.base, seed), self.outcome(other, seed)) for seed in seeds)
        return [self.question.difference(base, own) for base, own in pairs]

    def interval(self, other: str) -> Interval:
        """Return the interval of all pairs' mean difference."""
        return Interval.of(self.differences(other), self.error)

    def undecided(self) -> list[str]:
        """Return the configurations that are not decided yet."""
        return [other for other in self.others if not self.interval(other).decided]

    def train(self, seeds: int, budget: float) -> Iterator[float]:
        """Train what is missing, round by round, until all is decided or has ``seeds`` pairs.

        Args:
            seeds: the number of seeds.
            budget: seconds after which a run is killed; no round begins that would take longer.

        Yields:
            After each round, the seconds that the rest takes at most.

        Raises:
            BudgetSpent: if the budget ends before the comparison.
            RunFailed: if a run fails.
            ConfigError: if ``fit`` refuses a configuration, or no run has the metric.
        """
        deadline = time.monotonic() + budget
        for seed in range(seeds):
            names = self._to_train()
            missing = [n for n in order_of(names, seed) if (n, seed) not in self.runs.seconds]
            if not missing:
                continue
            expected = self._seconds(missing)
            if expected > deadline - time.monotonic():
                raise BudgetSpent(f"another round takes {duration(expected)}, more than is left")
            for name in missing:
                self.runs.train(name, seed, deadline)
            yield (seeds - seed - 1) * self._seconds(self._to_train())

    def _to_train(self) -> list[str]:
        undecided = self.undecided()
        return [self.base, *undecided] if undecided else []

    def _seconds(self, names: Sequence[str]) -> float:
        """Return the seconds that a run of each will take, judging by their runs so far."""
        known = ([self.runs.seconds[n, seed] for seed in self.seeds_of(n)] for n in names)
        return sum(fmean(seconds) for seconds in known if seconds)
