"""Evaluate: accuracy on held-out prompts, before, during and after training."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.report import RunReport
from lightning_rl.callbacks.weight_sync import WeightSync
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.hooks import datamodule_of, find_callbacks, last_iteration


@configurable
class Evaluate(RLCallback):
    """Records ``eval/accuracy``, ``eval/reward_mean``, ``eval/pass@k`` and more.

    It evaluates before training, after every N-th iteration and after the last, also if the run is
    stopped early. It always measures the present policy: if the schedule of ``WeightSync`` has left
    the engine behind, weights are synced first. The ``eval_*`` arguments of the data module set
    what is evaluated, and how it is sampled.

    Args:
        every_n_iterations: evaluate after every N-th iteration, and after the last.
        before_training: evaluate the untrained policy too.

    Raises:
        ConfigError: if a number is below 1; at start, if there is nothing to evaluate on, or a
            second such callback.
    """

    def __init__(self, every_n_iterations: int = 10, before_training: bool = True) -> None:
        if every_n_iterations < 1:
            raise ConfigError(f"Evaluate(every_n_iterations={every_n_iterations}) must be >= 1")
        self.every_n_iterations = every_n_iterations
        self.before_training = before_training
        self._evaluated: int | None = None  # the version that was evaluated last

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = datamodule_of(trainer)
        if not isinstance(datamodule, CollectingDataModule):
            raise ConfigError(
                f"Evaluate has nothing to evaluate on: {type(datamodule).__name__} collects no "
                "rollouts; use EvaluateRollouts, which has its own prompts, or remove the callback"
            )
        if not datamodule.evaluates:
            fix = datamodule.nothing_to_evaluate
            raise ConfigError(f"Evaluate has nothing to evaluate on; {fix}")
        if stage == "fit":
            check_evaluations(trainer)
        self._evaluated = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.module_of(pl_module)
        # A resumed run may have been stopped in the middle of an evaluation.
        begins = not trainer.ckpt_path and self.before_training
        if begins or self.should_evaluate(trainer, module.iteration):
            self.evaluate(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = self.module_of(pl_module)
        if self.should_evaluate(trainer, module.iteration):
            self.evaluate(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.module_of(pl_module)
        if self._evaluated != module.iteration:  # what stopped the run could not be foreseen
            self.evaluate(trainer, module)
            module.flush_metrics()  # the iteration's row is written already

    def should_evaluate(self, trainer: Trainer, version: int) -> bool:
        """Return True to evaluate the policy of this version; override it to change the schedule.

        The last version is evaluated in any case.
        """
        if version == 0:
            return self.before_training
        return version % self.every_n_iterations == 0 or is_last(trainer, version)

    def evaluate(self, trainer: Trainer, module: RecordingModule) -> None:
        """Roll out the held-out prompts with the present weights, and record the results."""
        for sync in find_callbacks(trainer, WeightSync):
            sync.catch_up(trainer, module)
        rollouts, metrics = self.data_of(trainer).evaluate()
        for report in find_callbacks(trainer, RunReport) if trainer.is_global_zero else ():
            report.keep_failed(trainer, rollouts)
        module.record(metrics)
        self._evaluated = module.iteration


def is_last(trainer: Trainer, version: int) -> bool:
    """Return True if the run ends with this iteration, judging by its number of steps."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    return version == last_iteration(trainer, version)


def check_evaluations(trainer: Trainer) -> None:
    """Check that a run has at most one ``Evaluate``.

    Raises:
        ConfigError: if there are several.
    """
    count = len(find_callbacks(trainer, Evaluate))
    if count > 1:
        raise ConfigError(
            f"trainer.callbacks: there are {count} Evaluate, which would roll out the same "
            "held-out prompts again; remove all but one, and set its every_n_iterations"
        )
