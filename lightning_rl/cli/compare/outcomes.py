"""Questions of a comparison to its runs: a metric's last value, or the seconds until a target."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rl.cli.compare.intervals import Interval
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.run.files.metrics import MetricsLog, Row, read_rows


@dataclass(frozen=True)
class Outcome:
    """A run's result: the metric's last value, and seconds.

    ``reached_s`` are those from the start of ``fit`` until the metric first was at least the target
    (None if it never was, or there is no target); ``wall_s`` and ``cpu_s`` are of the whole fit.
    """

    value: float
    reached_s: float | None
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class FinalValue:
    """Asks for the last value of a metric, which is that of the trained policy."""

    metric: str

    def answered_by(self, run: Path) -> Outcome:
        """Read a run's outcome from its directory.

        Raises:
            ConfigError: if the run did not record the metric; names similar ones.
            DataError: if its last value is not a number, or the run left no results.
        """
        try:
            summary = json.loads((run / "summary.json").read_bytes())
            rows = read_rows((run / MetricsLog.NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{run}: its results cannot be read ({error}); only modules of this library leave "
                "any, by the callback RunReport, and not with fast_dev_run"
            ) from error
        measured = [row for row in rows if self.metric in row]
        if not measured:
            known = sorted({name for row in rows for name in row if "/" in name})
            close = get_close_matches(self.metric, known) or known
            raise ConfigError(
                f"--metric {self.metric}: {run} has no such metric, but {', '.join(close)}"
            )
        value = measured[-1][self.metric]
        if not math.isfinite(value):
            raise DataError(f"{run}: the last {self.metric} is {value}, which cannot be compared")
        return Outcome(value, self._reached(measured), summary["wall_s"], summary["cpu_s"])

    def _reached(self, rows: Sequence[Row]) -> float | None:
        return None

    def difference(self, base: Outcome, other: Outcome) -> float:
        """Return the other's value minus the base's."""
        return other.value - base.value

    @property
    def difference_is(self) -> str:
        """The quantity of which a difference is one, in words."""
        return f"difference of {self.metric}"

    def summed_up(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return what a table says of a configuration's outcomes."""
        return {self.metric: fmean(outcome.value for outcome in outcomes)}

    def compared(self, interval: Interval) -> dict[str, float]:
        """Return what a table says of a comparison with the base."""
        return _bounded("difference", interval.mean, interval.low, interval.high)

    def decision(self, interval: Interval) -> str:
        """Return the words between the name of a configuration and that of the base."""
        return f"has a {'higher' if interval.mean > 0 else 'lower'} {self.metric} than"


@dataclass(frozen=True)
class SecondsToTarget(FinalValue):
    """Asks for the seconds until the metric is first at least ``target``, at an evaluation."""

    target: float

    def _reached(self, rows: Sequence[Row]) -> float | None:
        return next((row["wall_s"] for row in rows if row[self.metric] >= self.target), None)

    def difference(self, base: Outcome, other: Outcome) -> float:
        """Return the logarithm of the ratio of the other's seconds to the base's.

        A run that never reached the target was watched until it ended. So a pair's seconds are
        compared up to the first such end, and longer ones count as that long: the pair's ratio is
        understated, never overstated, and 1 if neither reached the target.
        """
        ends = (run.wall_s for run in (base, other) if run.reached_s is None)
        watched = min(ends, default=math.inf)
        reached = (math.inf if run.reached_s is None else run.reached_s for run in (base, other))
        base_s, other_s = (min(seconds, watched) for seconds in reached)
        return math.log(other_s / base_s)

    @property
    def difference_is(self) -> str:
        return f"log ratio of seconds to {self.target:g}"

    def summed_up(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        reached = [outcome.reached_s for outcome in outcomes if outcome.reached_s is not None]
        return super().summed_up(outcomes) | {
            f"reached {self.target:g}": f"{len(reached)} of {len(outcomes)}",
            "after s": fmean(reached) if reached else None,
        }

    def compared(self, interval: Interval) -> dict[str, float]:
        return _bounded("ratio", *map(_exp, (interval.mean, interval.low, interval.high)))

    def decision(self, interval: Interval) -> str:
        return f"reaches it {'later' if interval.mean > 0 else 'sooner'} than"


def _bounded(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """Return cells of a table; that of a value has its interval behind it."""
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _exp(logarithm: float) -> float:
    try:
        return math.exp(logarithm)
    except OverflowError:
        return math.inf
