"""Iterations that are trained again, and rollouts that are written and graded again."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from lightning_rl.cli.rerun.compare import IterationRerun, rerun_iteration
from lightning_rl.cli.rerun.rebuild import remade
from lightning_rl.cli.rerun.rollouts import (
    RolloutRerun,
    data_with_engine,
    decoder_of,
    pushed_engine,
    written_again,
)
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.log import first_difference
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout, RolloutStatus

CLOSE = 1e-3
"""Of metrics, relative to the larger: what rounding on another machine may make of them."""
NEAR_ZERO = 1e-4
"""The same, of metrics that are zero but for rounding, such as gaps of logprobs in nats."""


@dataclass(frozen=True)
class IterationVerdict:
    """What came of an iteration that was trained again.

    ``elsewhere`` is what differs between where that was and where it was trained first.
    """

    rerun: IterationRerun
    elsewhere: list[str]

    @property
    def rounded(self) -> bool:
        """Different, and no more than rounding on another machine makes it."""
        return bool(self.elsewhere) and not self.rerun.equal and self._far() is None

    @property
    def good(self) -> bool:
        """Equal, or as good as equal."""
        return self.rerun.equal or self.rounded

    def line(self) -> str:
        """Tell a person."""
        rerun = self.rerun
        told = f"iteration {rerun.recorded.version}, from {rerun.kept}"
        if rerun.equal:
            return f"{told}: equal, {len(rerun.again.weights)} weight tensors bit for bit"
        if self.rounded:
            return f"{told}: equal within rounding of another machine ({self.elsewhere[0]})"
        return f"{told}: DIFFERENT, {self._difference()}"

    def _difference(self) -> str:
        rerun, parts = self.rerun, []
        if rerun.diverged_at is not None:
            name = first_difference(rerun.recorded.weights, rerun.again.weights) or "none any more"
            parts.append(f"weights since version {rerun.diverged_at}, now first in {name}")
        if rerun.checkpoint_differs:
            parts.append(f"{rerun.checkpoint} in {rerun.checkpoint_differs}")
        again = rerun.again.metrics
        differ = (name for name in again if rerun.recorded.metrics.get(name) != again[name])
        metric = (self._far() if self.elsewhere else None) or next(differ, None)
        if metric is not None:
            was, now = rerun.recorded.metrics.get(metric, math.nan), again[metric]
            parts.append(f"{metric} was {was:.6g}, is {now:.6g}")
        return "; ".join(parts)

    def _far(self) -> str | None:
        """The first metric that is further off than rounding makes it."""
        recorded = self.rerun.recorded.metrics
        for name, now in self.rerun.again.metrics.items():
            was = recorded.get(name, math.nan)
            if not (was == now or math.isclose(was, now, rel_tol=CLOSE, abs_tol=NEAR_ZERO)):
                return name
        return None


@dataclass(frozen=True)
class RolloutVerdict:
    """What came of a rollout that was written and graded again.

    ``rewards`` are those that differ, by name: as recorded, and now.
    """

    rerun: RolloutRerun
    rewards: dict[str, tuple[float | None, float | None]]
    error: str | None

    @property
    def good(self) -> bool:
        return self.rerun.equal and not self.rewards and self.error is None

    def lines(self) -> Iterator[str]:
        recorded = self.rerun.recorded
        told = f"  rollout {recorded.id}: "
        if self.rerun.equal:
            yield f"{told}{recorded.length} tokens equal{self._graded()}"
        else:
            yield f"{told}DIFFERENT, {self.rerun.lines()[-1]}"
        for name, (was, now) in self.rewards.items():
            yield f"{told}DIFFERENT, {name} was {was}, is {now} when it is graded again"
        if self.error is not None:
            yield f"{told}DIFFERENT, it cannot be graded again: {self.error}"

    def _graded(self) -> str:
        reward = self.rerun.recorded.reward
        same = not self.rewards and self.error is None and reward is not None
        return f", reward {reward:g} again" if same else ""


def drawn_iterations(run: RecordedRun, share: float, random: Random) -> list[int]:
    """A share of the iterations that can be trained again, at least one, in their order."""
    held = sorted(run.log.iterations() & run.log.outcomes().keys())
    count = min(len(held), max(1, math.ceil(share * len(held))))
    return sorted(random.sample(held, count))


def iteration_again(
    run: RecordedRun, iteration: int, environment: Mapping[str, Any]
) -> IterationVerdict:
    """Train an iteration again; ``environment``: where it was trained first."""
    rerun = rerun_iteration(run, iteration)
    here = rerun.environment
    differ = [name for name in environment if environment[name] != here.get(name)]
    elsewhere = [f"{name}: {environment[name]}, here {here.get(name)}" for name in differ]
    return IterationVerdict(rerun, elsewhere)


@dataclass(frozen=True)
class Drawn:
    """A recorded rollout, and all that were trained on of its group."""

    rollout: Rollout
    group: list[Rollout]


def drawn_rollouts(
    run: RecordedRun, iterations: Sequence[int], count: int, random: Random
) -> dict[int, list[Drawn]]:
    """``count`` rollouts of each iteration, by the one version of the weights that wrote them."""
    drawn: defaultdict[int, list[Drawn]] = defaultdict(list)
    for iteration in iterations:
        rollouts = run.log.rollouts(iteration)
        sound = [r for r in rollouts if not r.expert and len(set(r.written_versions())) == 1]
        for rollout in random.sample(sound, min(count, len(sound))):
            group = [r for r in rollouts if r.group_id == rollout.group_id]
            drawn[rollout.written_versions()[0]].append(Drawn(rollout, group))
    return dict(sorted(drawn.items()))


def rollouts_again(
    run: RecordedRun, version: int, drawn: Sequence[Drawn]
) -> Iterator[RolloutVerdict]:
    """Let the run's engine and agent write rollouts again, and its rewards grade what was recorded.

    A reward may look at all rollouts of a prompt, so these are graded together.
    """
    with remade(run, version, version) as made:
        if not made.trainer.is_global_zero:  # it has helped to train
            return
        data = data_with_engine(made)
        differ = made.diverged_at(run.log.outcomes()) is not None
        with pushed_engine(made, data):
            for one in drawn:
                recorded = one.rollout
                again = written_again(made, data, recorded)
                rerun = RolloutRerun(
                    recorded, again, version, made.kept, differ, True, decoder_of(made)
                )
                graded = _graded_again(data.task_of(recorded.prompt).rewards, one)
                yield RolloutVerdict(rerun, _other_rewards(recorded, graded), graded.error)


def _graded_again(rewards: Rewards, drawn: Drawn) -> Rollout:
    """What the run's rewards make of a recorded rollout now."""
    group = [_ungraded(rollout) for rollout in drawn.group]
    rewards.grade_here([group])
    return next(rollout for rollout in group if rollout.id == drawn.rollout.id)


def _ungraded(rollout: Rollout) -> Rollout:
    return replace(
        rollout, status=RolloutStatus.COMPLETED, reward=None, reward_parts={}, error=None
    )


def _other_rewards(
    recorded: Rollout, graded: Rollout
) -> dict[str, tuple[float | None, float | None]]:
    was: dict[str, Any] = {"reward": recorded.reward, **recorded.reward_parts}
    now: dict[str, Any] = {"reward": graded.reward, **graded.reward_parts}
    return {name: (was[name], now.get(name)) for name in was if not _same(was[name], now.get(name))}


def _same(was: float | None, now: float | None) -> bool:
    if was is None or now is None:
        return was is now
    return math.isclose(was, now, rel_tol=1e-9, abs_tol=1e-12)
