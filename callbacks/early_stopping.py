"""Lightning's monitoring callbacks, evaluated after iterations; unknown metrics are refused."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.evaluate import Evaluate
from lightning_rl.errors import ConfigError
from lightning_rl.learn.schedulers import monitor_of
from lightning_rl.run.hooks import find_callbacks


def _has_update(names: Iterable[str]) -> bool:
    """Return True for the names of a row whose iteration had an update, of any learner."""
    ends = ((name.split("/")[0], name.rsplit("/")[-1]) for name in names)
    return any(kind in ("policy", "value") and what == "loss" for kind, what in ends)


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
        complete = bool(alike) if kind == "eval/" and evaluates else _has_update(names)
        if complete:
            self.require(alike)

    def require(self, alike: Collection[str]) -> None:
        """Refuse the metric unless it has appeared; ``alike`` are those that a message names.

        Raises:
            ConfigError: names them, or else all that have appeared.
        """
        self._seen |= set(alike)
        if self.name in self._seen:
            return
        close = get_close_matches(self.name, self._seen, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{self.whose}(monitor={self.name!r}): no such metric was recorded; {hint}The recorded "
            f"metrics are {', '.join(sorted(alike or self._seen))}. A callback that records it "
            "later has to record nan until then"
        )


class StopEarly(RLCallback):
    """Evaluates every ``EarlyStopping`` on the rows of metrics that hold its monitor.

    Lightning's own is evaluated at the end of epochs, or after a validation loop, which RL does not
    have. With ``check_on_train_epoch_end=True`` it is left alone. ``fit`` adds this callback.
    """

    def __init__(self, stoppers: list[EarlyStopping]) -> None:
        self._stoppers = stoppers

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
        for stopper in self._stoppers:
            if stopper.monitor in metrics:
                stopper._run_early_stopping_check(trainer)


class KnownMonitors(RLCallback):
    """Ends a run in which a callback or a learning-rate schedule follows an unknown metric, so that
    it would do nothing; and lets ``ModelCheckpoint`` remember the best of a run that was resumed in
    another folder.

    ``fit`` adds this callback, before those that it speaks for. It looks at rows of metrics and, in
    Lightning's own loop, at what was logged when a validation or an epoch ends.

    Raises:
        ConfigError: after the first evaluation or update, naming the recorded metrics.
    """

    def __init__(self, followers: Sequence[Any]) -> None:
        self._savers = [one for one in followers if isinstance(one, ModelCheckpoint)]
        self._monitors = [
            Monitor(one.monitor, type(one).__name__) for one in followers if one.monitor
        ]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for saver in self._savers:  # which forgets the best if its folder is another
            state = checkpoint.get("callbacks", {}).get(saver.state_key, {})
            if "dirpath" in state:
                state["dirpath"] = saver.dirpath

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if (name := monitor_of(config.scheduler)) is not None:
                self._monitors.append(Monitor(name, type(config.scheduler).__name__))

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        evaluates = bool(find_callbacks(trainer, Evaluate))
        for monitor in self._monitors:
            # Of Lightning's own log, too.
            monitor.look({**metrics, **trainer.callback_metrics}, evaluates)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and pl_module.automatic_optimization:
            self._require_all(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self._require_all(trainer)

    def _require_all(self, trainer: Trainer) -> None:
        """Check that everything that is followed is logged by now, in Lightning's own loop."""
        for monitor in self._monitors:
            monitor.require(trainer.callback_metrics)
