"""What if? Trains iterations again with a change, and compares them with the record."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_rl.cli.rerun.change import RerunChange
from lightning_rl.cli.rerun.compare import SHOWN, identical
from lightning_rl.cli.rerun.retraining import Retrained, retrain
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.collect.estimates import Comparison
from lightning_rl.data.rollouts.ledger import Ledger
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import ConfigError

LEAST_SHARE = 0.5
"""Effective share of rollouts, relative to the unchanged rerun's, below which nothing is concluded.
"""


@dataclass(frozen=True)
class WhatIf:
    """Iterations ``first`` and later trained again with a change, beside the record.

    ``plain`` is the unchanged rerun, from the same weights; ``left_out`` counts the rollouts that
    the change leaves out, by iteration; ``elsewhere`` says what is another on this machine.
    """

    change: RerunChange
    first: int
    recorded: dict[int, Outcome]
    plain: Retrained
    changed: Retrained
    left_out: dict[int, int]
    elsewhere: list[str]
    least_share: float = LEAST_SHARE

    @property
    def versions(self) -> range:
        """The versions that were trained again."""
        return range(self.plain.kept.version + 1, max(self.plain.outcomes) + 1)

    @property
    def not_reproduced(self) -> str | None:
        """The first difference of the unchanged rerun from the record; None: equal to the bit."""
        return difference(self.recorded, self.plain, self.versions)

    @property
    def too_far(self) -> int | None:
        """The first iteration whose rollouts are too unlikely under the changed policy; or None."""
        shares = self.plain.shares, self.changed.shares
        for version in self.versions:
            was, now = (own.get(version, 1.0) for own in shares)
            if version > self.first and now < self.least_share * was:
                return version
        return None

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Scores on held-out prompts, paired by prompt: unchanged, then changed."""
        scores = self.plain.scores, self.changed.scores
        found = {name: Comparison.of(own, scores[1][name]) for name, own in scores[0].items()}
        return {"accuracy": found["accuracy"]} if "accuracy" in found else found

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        last = self.versions[-1]
        yield f"iterations {self.versions[0]} to {last}, from {self.plain.kept}: {self.change}"
        yield from self._reproduced()
        for iteration, count in self.left_out.items():
            yield f"iteration {iteration}: {rollouts_of(count)} left out"
        before = difference(self.plain.outcomes, self.changed, range(self.first))
        if self.first > self.versions[0]:
            equal = "all is equal" if before is None else f"this machine repeats nothing, {before}"
            yield f"up to iteration {self.first - 1} nothing is changed: {equal}"
        was = "recorded" if self.not_reproduced is None else "unchanged"
        for version in range(self.first, last + 1):
            yield f"iteration {version}"
            yield from self._metrics(version, was)
        if last > self.first:
            yield (
                f"from iteration {self.first + 1} on, the rollouts were sampled by another policy "
                "than the changed one"
            )
        for name, comparison in self.comparisons.items():
            yield f"held-out {name} of version {last}, unchanged → changed: {comparison}"
        yield self.conclusion

    def _reproduced(self) -> Iterator[str]:
        if self.not_reproduced is None:
            yield "without the change all of them are equal to the record, bit for bit"
            return
        yield f"the record is NOT reproduced here: {self.not_reproduced}"
        yield from (f"  {what}" for what in self.elsewhere)
        yield "so the change is compared with an unchanged rerun on this machine"

    def _metrics(self, version: int, was: str) -> Iterator[str]:
        then, now = (own.outcomes[version].metrics for own in (self.plain, self.changed))
        if "policy/loss" not in now:
            yield "  no update: nothing is left to train on"
        for name in (n for n in SHOWN if n in now and n in then):
            yield f"  {name:<18} {was} {then[name]:<12.6g} changed {now[name]:.6g}"
        shares = self.plain.shares, self.changed.shares
        if all(version in own for own in shares):
            plain, changed = (own[version] for own in shares)
            yield f"  {'effective share':<18} {was} {plain:<12.3f} changed {changed:.3f}"

    @property
    def conclusion(self) -> str:
        """The answer in a sentence; it refuses one where the rollouts cannot give it."""
        if self.too_far is not None:
            was, now = (own.shares[self.too_far] for own in (self.plain, self.changed))
            return (
                f"no conclusion: the rollouts of iteration {self.too_far} are worth {now:.3f} of "
                f"their number to the changed policy, and {was:.3f} to the unchanged one, which is "
                f"a ratio below {self.least_share:g} (--least_share); end earlier, with --to "
                f"{self.too_far - 1}, or train a new run with the change"
            )
        if not self.comparisons:
            return "the rollouts still tell what the changed policy learns from them"
        [(name, found), *_] = self.comparisons.items()
        if found.low <= 0 <= found.high:
            return f"the held-out {name} does not differ beyond its noise"
        return f"with the change the held-out {name} is {'higher' if found.low > 0 else 'lower'}"

    @property
    def status(self) -> int:
        """The exit status: 1 if nothing can be concluded, else 0."""
        return int(self.too_far is not None)


def what_if(
    run: RecordedRun,
    change: RerunChange,
    to: int,
    since: int | None = None,
    evaluate: bool = False,
    least_share: float = LEAST_SHARE,
) -> WhatIf:
    """Train iterations up to ``to`` again, without and with a change.

    Args:
        run: the recorded run.
        change: what to do differently.
        to: the last iteration.
        since: begin with the kept weights of this version; None: with the latest before the first
            rollout that is left out.
        evaluate: also compare both policies on the run's held-out prompts.
        least_share: the smallest ratio of the effective shares of an iteration's rollouts, changed
            to unchanged, at which a conclusion is drawn.

    Raises:
        ConfigError: if the change is none, or does not work.
        DataError: if the run kept too little.
        EngineError: if the engine fails.
    """
    recorded = run.outcomes_with(to)
    if change.settings and since is None:
        raise ConfigError(
            f"--set {change.settings[0]} requires --since C, the kept version of the weights from "
            f"which on it holds (kept: {', '.join(str(kept.version) for kept in run.kept)})"
        )
    begin = _sampled_first(change) if since is None else since + 1
    left_out = change.left_out(run, range(begin, to + 1))
    if change.without and not left_out:
        raise ConfigError(
            f"{change}: iterations {begin} to {to} were trained on no such rollout; `lightning-rl "
            f"rollouts {run.log.path}/iteration-{to:06d}-000.parquet` lists those of an iteration"
        )
    first = begin if change.settings else min(left_out)
    latest = first - 1 if since is None else since
    plain = retrain(run, to, latest, since, evaluate=evaluate)
    changed = retrain(run, to, latest, since, change, evaluate)
    begins = [e for _, e in Ledger(run.path).lines() if e and e.get("kind") == "begin"]
    then = begins[-1]["environment"] if begins else {}
    here = plain.environment
    elsewhere = [f"{n}: {then[n]}, here {here.get(n)}" for n in then if then[n] != here.get(n)]
    return WhatIf(change, first, recorded, plain, changed, left_out, elsewhere, least_share)


def _sampled_first(change: RerunChange) -> int:
    """Return the earliest iteration for which rollouts that are left out were sampled."""
    numbers = [name.partition("/")[0] for name in change.without]
    known = [int(number) for number in numbers if number.isdecimal()]
    return max(1, min(known)) if len(known) == len(numbers) else 1


def rollouts_of(count: int) -> str:
    """Return a number of rollouts in words."""
    return "1 rollout" if count == 1 else f"{count} rollouts"


def difference(was: dict[int, Outcome], again: Retrained, versions: range) -> str | None:
    """Return the first metric or version of the weights that differs; None if all are equal."""
    for version in versions:
        if version not in was or version not in again.outcomes:
            continue
        then, now = was[version], again.outcomes[version]
        for name, value in now.metrics.items():
            if not identical(then.metrics.get(name, float("nan")), value):
                return f"{name} of iteration {version} was {then.metrics.get(name)}, is {value}"
        if then.weights != now.weights:
            return f"the weights of version {version} differ"
    return None
