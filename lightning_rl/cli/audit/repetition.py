"""Iterations that are trained again, and rollouts that are generated and graded again."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from lightning_rl.cli.audit.claims import same
from lightning_rl.cli.rerun.compare import IterationRerun, rerun_iteration, within_rounding
from lightning_rl.cli.rerun.rebuild import remade_for_one
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


@dataclass(frozen=True)
class IterationVerdict:
    """The result of training an iteration again.

    ``elsewhere`` lists the differences between this environment and the one it was first trained
    in.
    """

    rerun: IterationRerun
    elsewhere: list[str]

    @property
    def rounded(self) -> bool:
        """True if the results differ by no more than rounding on another machine explains."""
        return bool(self.elsewhere) and not self.rerun.equal and self._far() is None

    @property
    def good(self) -> bool:
        """True if the results are equal, or equal within rounding."""
        return self.rerun.equal or self.rounded

    def line(self) -> str:
        """Return the result as a line of text."""
        rerun = self.rerun
        text = f"iteration {rerun.recorded.version}, from {rerun.kept}"
        if rerun.equal:
            return f"{text}: equal, {len(rerun.again.weights)} weight tensors bit for bit"
        if self.rounded:
            return f"{text}: equal within rounding of another machine ({self.elsewhere[0]})"
        return f"{text}: DIFFERENT, {self._difference()}"

    def _difference(self) -> str:
        rerun, parts = self.rerun, []
        if rerun.diverged_at is not None:
            name = first_difference(rerun.recorded.weights, rerun.again.weights) or "none any more"
            parts.append(f"weights since version {rerun.diverged_at}, now first in {name}")
        if rerun.checkpoint_differs:
            parts.append(f"{rerun.checkpoint} in {rerun.checkpoint_differs}")
        metric = (self._far() if self.elsewhere else None) or next(iter(rerun.differing), None)
        if metric is not None:
            was, now = rerun.recorded.metrics.get(metric, math.nan), rerun.again.metrics[metric]
            parts.append(f"{metric} was {was:.6g}, is {now:.6g}")
        return "; ".join(parts)

    def _far(self) -> str | None:
        """Return the first metric that differs by more than rounding explains; None if there is
        none.
        """
        recorded = self.rerun.recorded.metrics
        for name, now in self.rerun.again.metrics.items():
            was = recorded.get(name, math.nan)
            if not within_rounding(was, now):
                return name
        return None


@dataclass(frozen=True)
class RolloutVerdict:
    """The result of generating and grading a rollout again.

    ``rewards`` holds the rewards that differ, by name: the recorded value and the new one.
    """

    rerun: RolloutRerun
    rewards: dict[str, tuple[float | None, float | None]]
    error: str | None

    @property
    def good(self) -> bool:
        return self.rerun.equal and not self.rewards and self.error is None

    def lines(self) -> Iterator[str]:
        recorded = self.rerun.recorded
        head = f"  rollout {recorded.id}: "
        if self.rerun.equal:
            yield f"{head}{recorded.length} tokens equal{self._graded()}"
        else:
            yield f"{head}DIFFERENT, {self.rerun.lines()[-1]}"
        for name, (was, now) in self.rewards.items():
            yield f"{head}DIFFERENT, {name} was {was}, is {now} when it is graded again"
        if self.error is not None:
            yield f"{head}DIFFERENT, it cannot be graded again: {self.error}"

    def _graded(self) -> str:
        reward = self.rerun.recorded.reward
        same = not self.rewards and self.error is None and reward is not None
        return f", reward {reward:g} again" if same else ""


def drawn_iterations(run: RecordedRun, share: float, random: Random) -> list[int]:
    """Draw a share of the iterations that can be trained again, at least one; returned in order."""
    held = sorted(run.log.iterations() & run.log.outcomes().keys())
    count = min(len(held), max(1, math.ceil(share * len(held))))
    return sorted(random.sample(held, count))


def iteration_again(
    run: RecordedRun, iteration: int, environment: Mapping[str, Any]
) -> IterationVerdict:
    """Train an iteration again; ``environment`` describes where it was first trained."""
    rerun = rerun_iteration(run, iteration)
    here = rerun.environment
    differ = [name for name in environment if environment[name] != here.get(name)]
    elsewhere = [f"{name}: {environment[name]}, here {here.get(name)}" for name in differ]
    return IterationVerdict(rerun, elsewhere)


Drawn = tuple[Rollout, list[Rollout]]
"""A recorded rollout, and all rollouts of its group that were trained on."""


def drawn_rollouts(
    run: RecordedRun, iterations: Sequence[int], count: int, random: Random
) -> dict[int, list[Drawn]]:
    """Draw ``count`` rollouts of each iteration, by the single version of the weights that wrote
    them.
    """
    drawn: defaultdict[int, list[Drawn]] = defaultdict(list)
    for iteration in iterations:
        rollouts = run.log.rollouts(iteration)
        sound = [r for r in rollouts if not r.demonstration and len(set(r.written_versions())) == 1]
        for rollout in random.sample(sound, min(count, len(sound))):
            group = [r for r in rollouts if r.group_id == rollout.group_id]
            drawn[rollout.written_versions()[0]].append((rollout, group))
    return dict(sorted(drawn.items()))


def rollouts_again(
    run: RecordedRun, version: int, drawn: Sequence[Drawn]
) -> Iterator[RolloutVerdict]:
    """Generate rollouts again with the run's engine and agent, and grade the recorded ones again.

    A reward may look at all rollouts of a prompt, so these are graded together.
    """
    with remade_for_one(run, version) as made:
        if made is None:  # it has helped to train
            return
        data = data_with_engine(made)
        differ = made.diverged_at(run.log.outcomes()) is not None
        with pushed_engine(made, data):
            for recorded, group in drawn:
                again = written_again(made, data, recorded)
                rerun = RolloutRerun(
                    recorded, again, version, made.kept, differ, True, decoder_of(made)
                )
                graded = _graded_again(data.task_of(recorded.prompt).rewards, recorded, group)
                yield RolloutVerdict(rerun, _other_rewards(recorded, graded), graded.error)


def _graded_again(rewards: Rewards, recorded: Rollout, group: list[Rollout]) -> Rollout:
    """Grade a recorded rollout and its group again with the run's rewards."""
    ungraded: dict[str, Any] = {"status": RolloutStatus.COMPLETED, "reward": None, "error": None}
    again = [replace(rollout, reward_parts={}, **ungraded) for rollout in group]
    rewards.grade_here([again])
    return next(rollout for rollout in again if rollout.id == recorded.id)


def _other_rewards(
    recorded: Rollout, graded: Rollout
) -> dict[str, tuple[float | None, float | None]]:
    was: dict[str, Any] = {"reward": recorded.reward, **recorded.reward_parts}
    now: dict[str, Any] = {"reward": graded.reward, **graded.reward_parts}
    return {name: (was[name], now.get(name)) for name in was if not same(was[name], now.get(name))}
