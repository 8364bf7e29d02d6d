"""What Lightning's callbacks that average weights lack in a run that begins to average late."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class AverageBegins(Callback):
    """Keeps an average at the current weights until its first update.

    Lightning's would be the initial weights until then, in checkpoints, in validation, and at the
    end of the run if nothing was averaged at all. ``fit`` adds this callback.

    Args:
        averaging: the callback that averages.
    """

    def __init__(self, averaging: WeightAveraging) -> None:
        self._averaging = averaging

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        average = self._averaging._average_model
        if average is not None and not average.n_averaged:
            average.module.load_state_dict(pl_module.state_dict())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = self._averaging._average_model
        if average is not None and not average.n_averaged:
            rank_zero_warn(
                f"{type(self._averaging).__name__} averaged nothing, because should_update() was "
                "False after every iteration (step_idx counts optimizer steps from 0); the result "
                "is the weights at the end"
            )
