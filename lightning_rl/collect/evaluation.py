"""Evaluation on held-out prompts: rollouts, always with the same seeds, and their metrics."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.collect.stats import evaluation_metrics, own_metrics, scores_by_prompt
from lightning_rl.collect.tasks import Task
from lightning_rl.rollout import Group, Rollout


class Evaluation:
    """Creates the groups of held-out prompts, and computes the metrics of their rollouts.

    Args:
        tasks: one per set of held-out prompts.
        before: the training tasks; an evaluation's requests take priority over theirs.
        seed: the seed from which the seed of every rollout is derived.
        own_metrics: functions ``f(rollouts) -> dict[str, float]`` for further metrics.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        before: Sequence[Task],
        seed: int,
        own_metrics: Sequence[Callable[..., dict[str, float]]] = (),
    ) -> None:
        first = min(task.sampling.priority for task in before) - 1
        self.tasks = [replace(t, sampling=replace(t.sampling, priority=first)) for t in tasks]
        self.seed = seed
        self.own_metrics = own_metrics

    def groups(self, limit: int | None = None) -> list[Group]:
        """Return empty groups, set by set, of each set's first ``limit`` prompts (None: all)."""
        return [
            group
            for task in self.tasks
            for group in task.new_groups(limit, self.seed, iteration=-1)
        ]

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

    def all_metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return ``eval/*`` of graded rollouts, including ``own_metrics``.

        Raises:
            ConfigError: if one of ``own_metrics`` fails.
        """
        metrics = self.metrics(rollouts)
        return metrics | own_metrics(self.own_metrics, rollouts, metrics)
