"""Trials: versions of the weights, recorded or made with a change, evaluated within a budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.cli.rerun.change import UNCHANGED, RerunChange
from lightning_rl.cli.rerun.retraining import Retrained, retrain
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.errors import DataError
from lightning_rl.run.processes.dist import any_rank, from_rank_zero

SCORES = {"eval/accuracy": "accuracy", "eval/reward_mean": "reward"}
"""Metrics that an evaluation gives by prompt, and the names of these scores."""


class BudgetSpentError(DataError):
    """The time that a bisection may take is over."""


@dataclass
class Trials:
    """Evaluates versions of a run's weights on its held-out prompts, the recorded ones once each.

    ``score`` is the name of the score by prompt. No trial begins after ``seconds``.

    Raises:
        BudgetSpentError: from each method, once the time is over.
    """

    run: RecordedRun
    score: str
    seconds: float
    count: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _known: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds since the first trial could begin."""
        return time.monotonic() - self._begun

    def recorded(self, version: int) -> dict[str, float]:
        """Return the scores by prompt of a version of the run's own weights."""
        if version not in self._known:
            self._known[version] = self._scores(version, version, UNCHANGED)
        return self._known[version]

    def changed(
        self, version: int, first: int, change: RerunChange, observers: Sequence[Callback] = ()
    ) -> dict[str, float]:
        """Return the same of a version that was made with a change from iteration ``first`` on.

        Updates for which nothing with an advantage is left are not made.

        Raises:
            ConfigError: if it leaves too little.
        """
        return self._scores(version, first - 1, change, [SkipIdle(), *observers])

    def batches(self, first: int, last: int) -> Retrained:
        """Train iterations again, unchanged, for what their updates see."""
        self._require_time()
        return retrain(self.run, last, first - 1)

    def _scores(
        self, version: int, latest: int, change: RerunChange, observers: Sequence[Callback] = ()
    ) -> dict[str, float]:
        self._require_time()
        self.count += 1
        made = retrain(self.run, version, latest, None, change, True, observers)
        if self.score not in made.scores:
            raise DataError(
                f"an evaluation of {self.run.path} gives no {self.score} by prompt, but "
                f"{', '.join(made.scores)}; choose another --metric"
            )
        return made.scores[self.score]

    def _require_time(self) -> None:
        if from_rank_zero(self.spent) > self.seconds:  # or ranks would wait for each other
            raise BudgetSpentError(
                f"the budget of {self.seconds:.0f} s is spent, after {self.count} evaluations; "
                "raise --budget, or narrow the search by --good and --bad"
            )


class SkipIdle(RLCallback):
    """Skips updates without any advantage, in which the optimizer's momentum alone would act."""

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision:
        tokens = batch["tokens"]
        idle = not any_rank(bool(tokens["advantages"][tokens["loss_mask"]].any()))
        if idle:
            self.module_of(trainer.lightning_module).record({"policy/skipped_share": 1.0})
        return Decision(skip=idle)


class RateCap(RLCallback):
    """Bounds the learning rate of each optimizer step."""

    def __init__(self, highest: float) -> None:
        self.highest = highest

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self._bound)

    def _bound(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = min(group["lr"], self.highest)
