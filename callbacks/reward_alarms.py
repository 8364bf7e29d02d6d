"""RewardAlarms: warns when a policy seems to game the reward instead of solving the task."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.tasks import Task
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.rollout import Rollout
from lightning_rl.run.metrics import summarize

_log = logging.getLogger(__name__)

Row = dict[str, float]


@configurable
@dataclass(eq=False, repr=False)
class RewardAlarms(RLCallback):
    """Compares the last ``window`` iterations with the first, and warns of signs of reward hacking.

    Records 0 or 1 for each alarm, every iteration, and logs a warning when one goes off:

    - ``alarm/length``: completions became ``length_ratio`` times as long, or as short.
    - ``alarm/duplicates``: ``rollout/duplicates_across``, the share of completions that some other
      prompt got too, rose by more than ``duplicates_rise``. (``rollout/duplicates_within``, the
      share that another rollout of the group repeats, is recorded only: it rises with certainty.)
    - ``alarm/components``: one reward rose and another of its prompt set fell, both by more than
      ``component_drift`` of their standard deviations. A reward of weight 0 counts: so one can be
      watched.
    - ``alarm/eval``: ``eval_metric`` is more than ``eval_drop`` below its best, though the mean
      reward is above what it was then. It shows in the row after the evaluation's.

    Args:
        window: iterations that are averaged at either end. Before twice as many are over, only
            ``alarm/eval`` can go off.
        length_ratio: more than 1.
        duplicates_rise: difference of two shares.
        component_drift: in standard deviations.
        eval_metric: what ``Evaluate`` records; higher is better.
        eval_drop: in units of ``eval_metric``.

    Raises:
        ConfigError: for values out of range.
    """

    language_only = True
    window: int = 10
    length_ratio: float = 2.0
    duplicates_rise: float = 0.3
    component_drift: float = 0.5
    eval_metric: str = "eval/accuracy"
    eval_drop: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(1, window=self.window, length_ratio=self.length_ratio)
        changes = {
            "duplicates_rise": self.duplicates_rise,
            "component_drift": self.component_drift,
            "eval_drop": self.eval_drop,
        }
        require_at_least(0, **changes)
        require_finite(length_ratio=self.length_ratio, **changes)
        self.first: list[Row] = []
        self.last: list[Row] = []
        self.best: dict[str, float] = {}
        self.on = dict.fromkeys(("length", "duplicates", "components", "eval"), False)

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        module, datamodule = self.rollout_module_of(pl_module), self.rl_data_of(trainer)
        if trainer.world_size > 1:  # all ranks judge by the same
            rollouts = datamodule.generated
        graded = [r for r in rollouts if r.graded]
        if graded:
            within, across = duplicate_shares(graded)
            module.record(
                {"rollout/duplicates_within": within, "rollout/duplicates_across": across}
            )
            self._add(summary_row(graded, across))
            if len(self.last) == self.window:
                weights = [component_weights(task) for task in datamodule.train_tasks]
                self._compare(weights, module.present_iteration)
        module.record({f"alarm/{name}": float(on) for name, on in self.on.items()})

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        value = metrics.get(self.eval_metric)
        if value is None or not self.first:
            return
        reward = mean_of(self.last or self.first, "reward")
        if not self.best or value >= self.best["value"]:
            self.best = {"value": value, "reward": reward}
        self._set(
            "eval",
            value < self.best["value"] - self.eval_drop and reward > self.best["reward"],
            f"{self.eval_metric} fell from {self.best['value']:.3g} to {value:.3g} while the mean "
            f"reward rose from {self.best['reward']:.3g} to {reward:.3g}",
            self.rollout_module_of(pl_module).iteration,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last, "best": self.best, "on": self.on}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.last = state_dict["first"], state_dict["last"]
        self.best, self.on = state_dict["best"], state_dict["on"]

    def _add(self, row: Row) -> None:
        if len(self.first) < self.window:
            self.first.append(row)
        else:
            self.last = [*self.last, row][-self.window :]

    def _compare(self, weights: Sequence[dict[str, float]], iteration: int) -> None:
        """Set the alarms that look at both ends; ``weights`` are of each prompt set's rewards."""
        before, now = mean_of(self.first, "tokens"), mean_of(self.last, "tokens")
        ratio = max(now, before) / max(1.0, min(now, before))
        tell = f"completions went from {before:.3g} to {now:.3g} tokens"
        self._set("length", ratio > self.length_ratio, tell, iteration)
        before, now = mean_of(self.first, "duplicates"), mean_of(self.last, "duplicates")
        tell = f"completions that several prompts share went from {before:.0%} to {now:.0%}"
        self._set("duplicates", now - before > self.duplicates_rise, tell, iteration)
        apart, tell = False, ""
        for own in weights:
            drifts = component_drifts(self.first, self.last, own)
            if not drifts:
                continue
            up, down = max(drifts, key=drifts.__getitem__), min(drifts, key=drifts.__getitem__)
            if min(drifts[up], -drifts[down]) > self.component_drift:
                apart = True
                tell = (
                    f"reward {up} rose by {drifts[up]:.2g} standard deviations while {down} fell "
                    f"by {-drifts[down]:.2g}"
                )
        self._set("components", apart, tell, iteration)

    def _set(self, name: str, on: bool, tell: str, iteration: int) -> None:
        if on and not self.on[name]:  # once, until it has been off again
            _log.warning("alarm/%s at iteration %d: %s. Read some rollouts.", name, iteration, tell)
        self.on[name] = on


def duplicate_shares(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Shares of rollouts whose tokens another of the group has, and a rollout of another prompt."""
    in_group = Counter((r.group_id, *r.token_ids) for r in rollouts)
    prompts: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rollout in rollouts:
        prompts[tuple(rollout.token_ids)].add(rollout.prompt.key)
    within = sum(in_group[(r.group_id, *r.token_ids)] > 1 for r in rollouts)
    across = sum(len(prompts[tuple(r.token_ids)]) > 1 for r in rollouts)
    return within / len(rollouts), across / len(rollouts)


def summary_row(rollouts: Sequence[Rollout], duplicates: float) -> Row:
    """Summary of an iteration for the alarms; mean and spread of each reward part too."""
    row = {
        "tokens": sum(r.length for r in rollouts) / len(rollouts),
        "duplicates": duplicates,
        "reward": summarize([r.reward for r in rollouts if r.reward is not None])[0],
    }
    scores: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, score in rollout.reward_parts.items():
            if score is not None:
                scores[component(rollout.prompt.set, name)].append(score)
    for name, values in scores.items():
        row[f"part/{name}"], row[f"std/{name}"] = summarize(values)
    return row


def component(prompt_set: str, reward: str) -> str:
    """A reward's name here, with its prompt set where there are several."""
    return f"{prompt_set}/{reward}" if prompt_set else reward


def component_weights(task: Task) -> dict[str, float]:
    """The weight of each component in the rewards of a task."""
    return {component(task.name, name): w for name, w in task.rewards.weights.items()}


def component_drifts(
    first: Sequence[Row], last: Sequence[Row], weights: dict[str, float]
) -> dict[str, float]:
    """By how many standard deviations the mean of each reward changed; > 0 is what it pays for.

    The larger standard deviation of both ends counts: a reward that was always 0 has none.
    """
    drifts = {}
    for name, weight in weights.items():
        ends = [[row for row in rows if f"part/{name}" in row] for rows in (first, last)]
        if not all(ends):
            continue  # it applied to no completion
        before, now = (mean_of(rows, f"part/{name}") for rows in ends)
        spread = max(mean_of(rows, f"std/{name}") for rows in ends)
        change = now - before if weight >= 0 else before - now
        drifts[name] = change / spread if spread > 0 else change * math.inf if change else 0.0
    return drifts


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Average of one value over rows."""
    return sum(row[name] for row in rows) / len(rows)
