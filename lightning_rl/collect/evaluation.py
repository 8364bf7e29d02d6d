"""Evaluation on held-out prompts: rollouts, always with the same seeds, and their metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.stats import evaluation_metrics, own_metrics, scores_by_prompt
from lightning_rl.collect.tasks import Task
from lightning_rl.config.arguments import configurable
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.rollout import Group, Rollout


@configurable(prompts=prompts_of)
@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, for ``Evaluate``, ``validate`` and ``test``, and how they are evaluated.

    Args:
        prompts: the prompts; a :class:`Mixture` for several sets, each evaluated as a whole. Also
            the path of a file; in Python also a list of prompts or rows, or a table.
        sampling: sampling settings; None: those of training. Greedy: ``temperature: 0``.
        samples: rollouts per prompt; from 2 on, pass@k is reported too, and maj@k where a reward
            gives answers.
        limit: evaluate only this many prompts, the first of each set; None: all.
        success_reward: a rollout with at least this reward counts as correct.
        metrics: functions ``f(rollouts) -> dict[str, float]`` of all rollouts, whose numbers are
            recorded as ``eval/<name>`` in addition to accuracy.

    Raises:
        ConfigError: for values out of range.
    """

    prompts: AnyPrompts
    sampling: Sampling | None = None
    samples: int = 1
    limit: int | None = None
    success_reward: float = 1.0
    metrics: list[Callable[..., dict[str, float]]] | None = None

    def __post_init__(self) -> None:
        counts = {"evaluation.samples": self.samples, "evaluation.limit": self.limit}
        require_at_least(1, **counts)
        require_finite(**{"evaluation.success_reward": self.success_reward})


def as_evaluation(given: Any) -> Any:
    """Convert prompts to their evaluation with all defaults; return anything else unchanged."""
    arguments = given is None or isinstance(given, Evaluation | Mapping)
    return given if arguments else Evaluation(given)


class HeldOut:
    """Creates the groups of held-out prompts, lets them be completed, and computes their metrics.

    Args:
        tasks: one per set of held-out prompts.
        before: the training tasks; an evaluation's requests take priority over theirs.
        seed: the seed from which the seed of every rollout is derived.
        limit: evaluate only this many prompts, the first of each set; None: all.
        own_metrics: functions ``f(rollouts) -> dict[str, float]`` for further metrics.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        before: Sequence[Task],
        seed: int,
        limit: int | None = None,
        own_metrics: Sequence[Callable[..., dict[str, float]]] = (),
    ) -> None:
        first = min(task.sampling.priority for task in before) - 1
        self.tasks = [replace(t, sampling=replace(t.sampling, priority=first)) for t in tasks]
        self.seed = seed
        self.limit = limit
        self.own_metrics = own_metrics

    def groups(self, limit: int | None = None) -> list[Group]:
        """Return empty groups, set by set; ``limit`` replaces the evaluation's own."""
        return [
            group
            for task in self.tasks
            for group in task.new_groups(limit or self.limit, self.seed, iteration=-1)
        ]

    def run(self, pipeline: RolloutPipeline) -> tuple[list[Rollout], dict[str, float]]:
        """Complete all groups, and return their rollouts and ``eval/*``; the same on all ranks.

        Raises:
            ConfigError: if one of ``own_metrics`` fails.
            EngineError: if the engine fails.
            RewardError: if too large a share of the rollouts could not be graded.
        """
        rollouts = pipeline.complete_together(self.groups(), self.tasks[0].sampling)
        metrics = self.metrics(rollouts)
        return rollouts, metrics | own_metrics(self.own_metrics, rollouts, metrics)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return ``eval/*`` of graded rollouts, without ``own_metrics``."""
        return evaluation_metrics(rollouts, self._success_rewards)

    def scores(self, rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
        """Return accuracy and reward of each prompt."""
        return scores_by_prompt(rollouts, self._success_rewards)

    @cached_property
    def _success_rewards(self) -> dict[str, float | None]:
        """The bar of each set; None where no reward can reach it, which is said once."""
        bars = {task.name: (task.success_reward, task.rewards.highest) for task in self.tasks}
        missed = [
            f"{f'prompt set {name!r}: ' if name else ''}success_reward={bar} is above {highest}, "
            "the most that its rewards can sum to with their weights"
            for name, (bar, highest) in bars.items()
            if bar > highest
        ]
        if missed:
            rank_zero_info(
                f"evaluations leave out accuracy and pass@k, since {'; '.join(missed)}; lower "
                "success_reward to have them"
            )
        return {name: None if bar > highest else bar for name, (bar, highest) in bars.items()}
