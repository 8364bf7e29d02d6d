"""StopEarly: Lightning's EarlyStopping, after an evaluation instead of an epoch."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from lightning_rl.callbacks.evaluate import Evaluate
from lightning_rl.callbacks.monitor import Monitor
from lightning_rl.hooks import RLCallback


class StopEarly(RLCallback):
    """Lets every ``EarlyStopping`` look at the rows of metrics that hold its monitor.

    Lightning's own looks at the end of epochs, or after a validation loop, which RL has none of.
    One with ``check_on_train_epoch_end=True`` stays as it is. ``PolicyModule`` adds this callback.

    Raises:
        ConfigError: if nobody records a monitor.
    """

    def __init__(self, stoppers: list[EarlyStopping]) -> None:
        self._stoppers = [(one, Monitor(one.monitor, type(one).__name__)) for one in stoppers]

    @classmethod
    def where_needed(cls, trainer: Trainer) -> list[Callback]:
        """What to add to a Trainer's callbacks; nothing if it has it, or needs it not."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        stoppers = [
            callback
            for callback in callbacks
            if isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end
        ]
        if not stoppers or any(isinstance(callback, cls) for callback in callbacks):
            return []
        for stopper in stoppers:  # else its setup decides for the end of epochs
            stopper._check_on_train_epoch_end = False
        return [cls(stoppers)]

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        evaluates = any(isinstance(callback, Evaluate) for callback in callbacks)
        for stopper, monitor in self._stoppers:
            if stopper.strict:
                monitor.look(metrics, evaluates)
            if stopper.monitor in metrics:
                stopper._run_early_stopping_check(trainer)
