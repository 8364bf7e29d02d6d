"""The search: the window of a drop, the iteration, what is suspect, and what a rerun without it
gives.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from lightning.pytorch import Callback

from lightning_rl.cli.bisect.curve import Curve, Window, beyond_noise, stands_out
from lightning_rl.cli.bisect.signatures import suspicions
from lightning_rl.cli.bisect.suspicion import CALM, LOOK_BACK, Batches, Suspicion
from lightning_rl.cli.bisect.trials import BudgetSpentError, RateCap, Trials
from lightning_rl.cli.rerun.change import RerunChange
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.cli.rerun.what_if import difference, rollouts_of
from lightning_rl.collect.estimates import Comparison
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import ConfigError, DataError

PAIRED, UNPAIRED = 2.0, 4.0
"""Least drop that is looked for, in spreads of a curve's earlier steps: where it is also compared
prompt by prompt, and where it is not.
"""
RECOVERED = 0.5
"""Least share of a drop that a rerun without its cause gets back."""


@dataclass
class Bisection:
    """The result of a bisection.

    ``drop`` compares the good version with the bad one, prompt by prompt; None if the metric is not
    evaluated. ``iteration`` is None if nothing was found. ``recovered`` compares the weights after
    ``tried`` with those made without the cause, and ``suspects`` are the rollouts it consists of.
    """

    metric: str
    curve: Curve
    window: Window | None
    drop: Comparison | None = None
    iteration: int | None = None
    suspicion: Suspicion | None = None
    tried: int | None = None
    recovered: Comparison | None = None
    suspects: list[Seen] = field(default_factory=list)
    mass: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        if self.iteration is None:
            return f"nothing found: {self.metric} has no drop beyond its noise"
        where = f"{self.metric} drops with iteration {self.iteration}"
        if self.suspicion is None and self.suspects:
            return (
                f"{where}; the harm is in {rollouts_of(len(self.suspects))}, its kind is not known"
            )
        if self.suspicion is None:
            return f"{where}; its cause cannot be told"
        return f"{where}: {self.suspicion.cause.value}"

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        yield self.headline
        if self.window is not None and self.drop is not None:
            yield f"versions {self.window.good} → {self.window.bad}: {self.drop}"
        if self.suspicion is not None:
            last = self.suspicion.last
            yield f"iterations {self.suspicion.onset} to {last}: {self.suspicion.text}"
        if self.recovered is not None:
            what = rollouts_of(len(self.suspects)) if self.suspects else "it"
            if self.suspicion is not None and self.suspicion.part is not None:
                what = f"the reward {self.suspicion.part}"
            yield f"version {self.tried} with → without {what}: {self.recovered}"
        if self.suspects:
            yield f"they are {self.mass:.0%} of the absolute advantages of their updates"
        yield from self.notes


class Search:
    """Looks for the iteration with which a metric dropped, and its cause."""

    def __init__(
        self, trials: Trials, rows: Mapping[int, Mapping[str, float]], say: Callable[[str], None]
    ) -> None:
        self.trials, self.rows, self.say = trials, rows, say
        self.batches: Batches = {}

    def run(
        self, metric: str, curve: Curve, window: Window, outcomes: dict[int, Outcome]
    ) -> Bisection:
        """Return the verdict on a window; it says where the budget ended it.

        Raises:
            DataError: if the run kept too little.
            EngineError: if the engine fails.
        """
        verdict = Bisection(metric, curve, window)
        try:
            self._find(verdict, window, outcomes)
        except BudgetSpentError as error:
            verdict.notes.append(str(error))
        return verdict

    def _find(self, verdict: Bisection, window: Window, outcomes: dict[int, Outcome]) -> None:
        good, bad = window.good, window.bad
        verdict.drop = self._compared(good, bad)
        if not beyond_noise(verdict.drop, window.pairs) or verdict.drop.difference > 0:
            return
        if window.pairs > 1 and not stands_out(verdict.curve, window, PAIRED):
            verdict.notes.append("the drop is not larger than the usual steps of this curve")
            return
        verdict.iteration = self._step(verdict, good, bad)
        first = max(1, good - LOOK_BACK - CALM)
        self.say(f"iterations {first} to {bad}: looking for what is other than before")
        plain = self.trials.batches(first, bad)
        different = difference(outcomes, plain, range(first, bad + 1))
        if different is not None:
            verdict.notes.append(
                f"the record is not reproduced here ({different}); reruns are compared with each "
                "other, on this machine"
            )
        verdict.notes += [
            f"from iteration {v + 1} on the run was configured otherwise: {'; '.join(map(str, c))}"
            for v, c in self.trials.run.changes(first, bad).items()
        ]
        self.batches = {v: seen for v, seen in plain.seen.items() if v >= first}
        begin = max(first + CALM, good - LOOK_BACK)
        for one in suspicions(self.batches, self.rows, begin):
            if self._is_cause(verdict, one, window):
                return
        self._halve(verdict, window)

    def _compared(self, before: int, after: int) -> Comparison:
        return Comparison.of(self.trials.recorded(before), self.trials.recorded(after))

    def _step(self, verdict: Bisection, good: int, bad: int) -> int:
        """Return the first version that is nearer to the bad one than to the good one."""
        ends = [fmean(self.trials.recorded(version).values()) for version in (good, bad)]
        while bad - good > 1:
            middle = (good + bad) // 2
            value = verdict.curve.get(middle)
            if value is None:
                self.say(f"version {middle}: evaluating, between {good} and {bad}")
                value = fmean(self.trials.recorded(middle).values())
            good, bad = (middle, bad) if value > fmean(ends) else (good, middle)
        return bad

    def _is_cause(self, verdict: Bisection, one: Suspicion, window: Window) -> bool:
        """Train again without what is suspect, and tell whether the metric recovers.

        First as far as half of the drop, since later rollouts are those of a worse policy.
        """
        assert verdict.iteration is not None
        told = f"{one.cause.value}, iterations {one.onset} to {one.last} ({one.text})"
        for version in dict.fromkeys((max(one.onset, verdict.iteration), window.bad)):
            self.say(f"{one.cause.value}: {one.text}; training again without, up to {version}")
            last = min(version, one.last)
            suspects = [s for v in range(one.onset, last + 1) for s in self.batches.get(v, ())
                        if s.rollout.id in set(one.rollouts)]  # fmt: skip
            cap = [] if one.cap is None else [RateCap(one.cap)]
            change = _leaving_out(suspects)
            if one.part is not None:  # what these rollouts earn otherwise is known
                change = RerunChange(unpaid=(one.part,))
            try:
                found = self._changed(version, one.onset, change, cap)
            except BudgetSpentError:
                raise
            except (ConfigError, DataError) as error:
                verdict.notes.append(f"not tried: {told}: {error}")
                return False
            if self._recovers(found, window.good, version):
                verdict.suspicion = one
                self._name(verdict, one.onset, version, found, suspects)
                return True
        verdict.notes.append(f"not the cause: {told}; without it: {found}")
        return False

    def _changed(
        self, version: int, first: int, change: RerunChange, cap: Sequence[Callback] = ()
    ) -> Comparison:
        """Compare a version with what it is when trained again from ``first`` on with a change."""
        scores = self.trials.changed(version, first, change, cap)
        return Comparison.of(self.trials.recorded(version), scores)

    def _recovers(self, found: Comparison, good: int, version: int) -> bool:
        """Tell whether a change brings back enough of what the good version had."""
        before = fmean(self.trials.recorded(good).values())
        fell = before - fmean(self.trials.recorded(version).values())
        return found.difference > max(0.0, RECOVERED * fell) and beyond_noise(found)

    def _halve(self, verdict: Bisection, window: Window) -> None:
        """Look for the iteration, then groups, then rollouts without which the metric recovers.

        Halves have the larger absolute advantages first, which were the larger part of the update.
        """
        assert verdict.iteration is not None
        step = verdict.iteration
        left = [(v, s) for v in range(window.good + 1, step + 1) for s in self.batches.get(v, ())]
        for of in (lambda v, _: v, lambda _, s: s.rollout.group_id, lambda _, s: s.rollout.id):
            mass: defaultdict[int | str, float] = defaultdict(float)
            for v, s in left:
                mass[of(v, s)] += s.mass
            units = sorted(mass, key=lambda unit: -mass[unit])
            while len(units) > 1:
                half = (len(units) + 1) // 2
                for part in (units[:half], units[half:]):
                    self.say(f"version {step}: without {len(part)} of {len(units)} suspects")
                    tried = [(v, s) for v, s in left if of(v, s) in part]
                    suspects, first = [s for _, s in tried], min(v for v, _ in tried)
                    try:
                        found = self._changed(step, first, _leaving_out(suspects))
                    except ConfigError:  # it leaves too little for an update
                        continue
                    if self._recovers(found, window.good, step):
                        units, left = part, tried
                        self._name(verdict, first, step, found, suspects)
                        break
                else:
                    return

    def _name(
        self, verdict: Bisection, first: int, version: int, found: Comparison, suspects: list[Seen]
    ) -> None:
        verdict.iteration = first
        verdict.tried, verdict.recovered, verdict.suspects = version, found, suspects
        ids = {s.rollout.id for s in suspects}
        updates = (own for own in self.batches.values() if ids & {s.rollout.id for s in own})
        whole = sum(s.mass for own in updates for s in own)
        verdict.mass = sum(s.mass for s in suspects) / (whole or 1.0)


def _leaving_out(suspects: Sequence[Seen]) -> RerunChange:
    return RerunChange(tuple(s.rollout.id for s in suspects))


def told_apart(curve: Curve, window: Window, metric: str) -> Bisection:
    """Return the verdict on a metric that no evaluation gives by prompt, from its curve alone."""
    verdict = Bisection(metric, curve, window)
    if stands_out(curve, window, UNPAIRED):
        inside = [n for n in sorted(curve) if window.good <= n <= window.bad]
        steepest = min(pairwise(inside), key=lambda pair: curve[pair[1]] - curve[pair[0]])
        verdict.iteration = steepest[1]
        verdict.notes.append(
            f"{metric} is not evaluated prompt by prompt, so causes were not tried; choose "
            "eval/accuracy for these"
        )
    return verdict
