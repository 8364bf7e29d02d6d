"""What Lightning's callbacks that average weights lack in a run that begins late, or goes on."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor


class SoundAverages(Callback):
    """Keeps an average at the current weights until its first update, and both in checkpoints.

    Lightning's average is the initial weights until then: in checkpoints, in validation, and at the
    end of a run in which nothing was averaged. And at the end of a run it replaces the current
    weights, so that a checkpoint saved then could not be resumed. ``fit`` adds this callback before
    the one that averages.

    Args:
        averaging: the callback that averages.
    """

    def __init__(self, averaging: WeightAveraging) -> None:
        self._averaging = averaging
        self._current: dict[str, Tensor] | None = None  # when the run has ended

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        average = self._averaging._average_model
        if average is not None and not average.n_averaged:
            average.module.load_state_dict(pl_module.state_dict())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = pl_module.state_dict()
        self._current = {name: weight.detach().cpu().clone() for name, weight in state.items()}
        average = self._averaging._average_model
        if average is not None and not average.n_averaged:
            rank_zero_warn(
                f"{type(self._averaging).__name__} averaged nothing, because should_update() was "
                "False after every iteration (step_idx counts optimizer steps from 0); the result "
                "is the weights at the end"
            )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._current is not None:  # the module's are the average by now
            checkpoint["state_dict"] = self._current

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._current = None
