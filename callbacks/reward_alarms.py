"""RewardAlarms: warns when completions change in ways typical of reward hacking."""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.samples import FirstAndLast
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.rollout import Rollout

_log = logging.getLogger(__name__)


@configurable
@dataclass(eq=False, repr=False)
class RewardAlarms(RLCallback):
    """Compares completions of the last ``window`` iterations with those of the first.

    It records 0 or 1 for each alarm in every iteration, and logs a warning when one goes off:

    - ``alarm/length``: completions became ``length_ratio`` times as long, or as short.
    - ``alarm/duplicates``: ``rollout/duplicates_across``, the share of completions that another
      prompt got too, rose by more than ``duplicates_rise``. (``rollout/duplicates_within``, the
      share that another rollout of the group repeats, is only recorded: it rises as the policy gets
      certain.)

    Both may also be what the task asks for, so this callback is never added automatically. To stop
    a run, add ``MetricGuard(metric="alarm/length", bound=0, action=StopRun())``.

    Args:
        window: iterations that are averaged at either end.
        length_ratio: at least 1.
        duplicates_rise: difference of two shares.

    Raises:
        ConfigError: if a value is out of range.
    """

    language_only = True
    window: int = 10
    length_ratio: float = 2.0
    duplicates_rise: float = 0.3

    def __post_init__(self) -> None:
        require_at_least(1, window=self.window, length_ratio=self.length_ratio)
        require_at_least(0, duplicates_rise=self.duplicates_rise)
        require_finite(length_ratio=self.length_ratio, duplicates_rise=self.duplicates_rise)
        self.lengths, self.duplicates = FirstAndLast(self.window), FirstAndLast(self.window)
        """Mean tokens of each iteration's completions, and ``rollout/duplicates_across``."""
        self.on = dict.fromkeys(("length", "duplicates"), False)

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
            self.lengths.add([sum(r.length for r in graded) / len(graded)])
            self.duplicates.add([across])
            if self.lengths.full:
                self._compare(module.present_iteration)
        module.record({f"alarm/{name}": float(on) for name, on in self.on.items()})

    def state_dict(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths.state_dict(),
            "duplicates": self.duplicates.state_dict(),
            "on": self.on,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lengths.load_state_dict(state_dict["lengths"])
        self.duplicates.load_state_dict(state_dict["duplicates"])
        self.on = state_dict["on"]

    def _compare(self, iteration: int) -> None:
        before, now = (sample.mean for sample in self.lengths.both)
        ratio = max(now, before) / max(1.0, min(now, before))
        tell = f"completions went from {before:.3g} to {now:.3g} tokens"
        self._set("length", ratio > self.length_ratio, tell, iteration)
        before, now = (sample.mean for sample in self.duplicates.both)
        tell = f"completions that several prompts share went from {before:.0%} to {now:.0%}"
        self._set("duplicates", now - before > self.duplicates_rise, tell, iteration)

    def _set(self, name: str, on: bool, tell: str, iteration: int) -> None:
        if on and not self.on[name]:  # once, until it has been off again
            _log.warning("alarm/%s at iteration %d: %s. Read some rollouts.", name, iteration, tell)
        self.on[name] = on


def duplicate_shares(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the shares of rollouts whose tokens another rollout of the group has, and another
    prompt's.
    """
    in_group = Counter((r.group_id, *r.token_ids) for r in rollouts)
    prompts: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rollout in rollouts:
        prompts[tuple(rollout.token_ids)].add(rollout.prompt.key)
    within = sum(in_group[(r.group_id, *r.token_ids)] > 1 for r in rollouts)
    across = sum(len(prompts[tuple(r.token_ids)]) > 1 for r in rollouts)
    return within / len(rollouts), across / len(rollouts)
