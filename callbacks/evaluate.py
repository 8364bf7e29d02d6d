"""Evaluate: accuracy on held-out prompts, before and during training."""

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.arguments import configurable
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.hooks import RLCallback
from lightning_rl.module import PolicyModule


@configurable
class Evaluate(RLCallback):
    """Records ``eval/accuracy``, ``eval/pass@k`` and more every N iterations, and before training.

    It runs right after a weight sync, so it measures exactly the policy of that version. What is
    evaluated, and how it is sampled, are ``eval_*`` of the data module.

    Args:
        every_n_iterations: evaluate after every N-th iteration, and after the last.
        before_training: evaluate the untrained policy too, at iteration 0.
    """

    def __init__(self, every_n_iterations: int = 10, before_training: bool = True) -> None:
        if every_n_iterations < 1:
            raise ConfigError(f"Evaluate(every_n_iterations={every_n_iterations}) must be >= 1")
        self.every_n_iterations = every_n_iterations
        self.before_training = before_training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(datamodule, RLDataModule) or datamodule.eval_prompts is None:
            raise ConfigError("Evaluate has nothing to evaluate on; set data.eval_prompts")

    def on_weights_synced(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        if trainer.state.fn == "fit" and self.should_evaluate(trainer, version):
            assert isinstance(pl_module, PolicyModule)
            _, metrics = trainer.datamodule.evaluate()  # type: ignore[attr-defined]
            pl_module.record(metrics)

    def should_evaluate(self, trainer: Trainer, version: int) -> bool:
        """Whether to evaluate the policy of this version; override to change when."""
        if version == 0:
            return self.before_training
        return version % self.every_n_iterations == 0 or version == total_iterations(trainer)


def total_iterations(trainer: Trainer) -> int | None:
    """Iterations of the whole run; None if its end is set otherwise (by time or steps)."""
    epochs = trainer.max_epochs
    batches = trainer.num_training_batches
    if epochs is None or epochs < 0 or batches == float("inf"):
        return None
    return epochs * int(batches)
