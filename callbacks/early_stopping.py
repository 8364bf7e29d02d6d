"""Lightning's monitoring callbacks, evaluated after iterations; unknown metrics are refused."""

from collections.abc import Iterable
from difflib import get_close_matches

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.evaluate import Evaluate
from lightning_rl.errors import ConfigError
from lightning_rl.run.hooks import find_callbacks


class Monitor:
    """Looks for a metric in the rows of a run, until it appears.

    The metrics of an evaluation are known after the first one, all others after the first iteration
    with an update. A callback that records a value later must record nan until then.

    Args:
        name: the metric's name.
        whose: the callback that monitors it, for the message.
    """

    def __init__(self, name: str, whose: str) -> None:
        self.name = name
        self.whose = whose
        self._seen: set[str] = set()

    def look(self, row: Iterable[str], evaluates: bool) -> None:
        """Check the names in a row; ``evaluates``: the run has an ``Evaluate``.

        Raises:
            ConfigError: if the metric should have appeared by now; names those that exist.
        """
        names = set(row)
        self._seen |= names
        kind = self.name.split("/")[0] + "/"
        alike = sorted(name for name in self._seen if name.startswith(kind))
        complete = bool(alike) if kind == "eval/" and evaluates else "policy/loss" in names
        if self.name in self._seen or not complete:
            return
        close = get_close_matches(self.name, self._seen, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{self.whose}(monitor={self.name!r}): no such metric was recorded; {hint}The recorded "
            f"metrics are {', '.join(alike or sorted(self._seen))}. A callback that records it "
            "later has to record nan until then"
        )


class StopEarly(RLCallback):
    """Evaluates every ``EarlyStopping`` on the rows of metrics that hold its monitor.

    Lightning's own is evaluated at the end of epochs, or after a validation loop, which RL does not
    have. With ``check_on_train_epoch_end=True`` it is left alone. ``fit`` adds this callback.

    Raises:
        ConfigError: if no metric of the monitor's name is recorded.
    """

    def __init__(self, stoppers: list[EarlyStopping]) -> None:
        self._stoppers = [(one, Monitor(one.monitor, type(one).__name__)) for one in stoppers]

    @classmethod
    def where_needed(cls, trainer: Trainer) -> list[Callback]:
        """Return a list with this callback if it is needed and missing, else an empty list."""
        found = find_callbacks(trainer, EarlyStopping)
        stoppers = [stopper for stopper in found if not stopper._check_on_train_epoch_end]
        if not stoppers or find_callbacks(trainer, cls):
            return []
        for stopper in stoppers:  # else its setup decides for the end of epochs
            stopper._check_on_train_epoch_end = False
        return [cls(stoppers)]

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        evaluates = bool(find_callbacks(trainer, Evaluate))
        for stopper, monitor in self._stoppers:
            if stopper.strict:
                monitor.look(metrics, evaluates)
            if stopper.monitor in metrics:
                stopper._run_early_stopping_check(trainer)


class KnownMonitors(RLCallback):
    """Ends a run whose ``ModelCheckpoint`` monitors an unknown metric, so that it would save
    nothing.

    ``fit`` adds this callback.

    Raises:
        ConfigError: after the first evaluation or update, naming the recorded metrics.
    """

    def __init__(self, savers: list[ModelCheckpoint]) -> None:
        self._monitors = [Monitor(one.monitor, type(one).__name__) for one in savers if one.monitor]

    @classmethod
    def where_needed(cls, trainer: Trainer) -> list[Callback]:
        """Return a list with this callback if it is needed and missing, else an empty list."""
        savers = [one for one in find_callbacks(trainer, ModelCheckpoint) if one.monitor]
        return [cls(savers)] if savers and not find_callbacks(trainer, cls) else []

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        evaluates = bool(find_callbacks(trainer, Evaluate))
        for monitor in self._monitors:
            # Of Lightning's own log, too.
            monitor.look({**metrics, **trainer.callback_metrics}, evaluates)
