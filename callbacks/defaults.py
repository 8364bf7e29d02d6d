"""Callbacks that every run of this library gets, in scripts and on the command line."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.callbacks.averages import SoundAverages
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.checkpoint import IterationCheckpoint
from lightning_rl.callbacks.early_stopping import KnownMonitors, StopEarly
from lightning_rl.callbacks.export import HFExport
from lightning_rl.callbacks.guards import MetricGuard
from lightning_rl.callbacks.learning_alarms import LearningAlarms
from lightning_rl.callbacks.progress import RLProgressBar
from lightning_rl.callbacks.report import RunReport
from lightning_rl.callbacks.rerun_recorder import RerunRecorder
from lightning_rl.callbacks.stopping import StopWhenTold
from lightning_rl.callbacks.watchdog import Watchdog
from lightning_rl.callbacks.weight_sync import WeightSync
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import LanguageModule, RecordingModule
from lightning_rl.learn.offline import OfflineDataModule
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.supervised import SupervisedModule
from lightning_rl.run.files.checkpoint_io import VerifiedCheckpointIO
from lightning_rl.run.hooks import callbacks_of, datamodule_of, find_callbacks, is_fast_dev_run
from lightning_rl.run.known_warnings import ignore_known_warnings
from lightning_rl.run.processes.machine import raise_file_limit


class ParameterSummary(ModelSummary):
    """Lightning's summary without its table, whose layers say little here and whose FLOPs are 0.

    ``fit`` replaces Lightning's summary by it if that has the Trainer's default settings.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        *others: Any,
        **options: Any,
    ) -> None:
        total, trained = map(get_human_readable_count, (total_parameters, trainable_parameters))
        rank_zero_info(f"{total} parameters, {trained} of them trained; {model_size:.3g} MB")


IN_PLACE_OF: dict[type[Callback], type[Callback]] = {
    TQDMProgressBar: RLProgressBar,
    RichProgressBar: RLProgressBar,
    ModelSummary: ParameterSummary,
    RichModelSummary: ParameterSummary,
}


def own_display(trainer: Trainer) -> list[Callback]:
    """Replace Lightning's progress bar and summary by ours, and ignore its false alarms.

    Only those that the Trainer created, or that have their default settings, are replaced: a user's
    choice is kept, and what is switched off stays off. Returns the new callbacks.
    """
    ignore_known_warnings()
    callbacks = callbacks_of(trainer)
    replaced = [c for c in callbacks if type(c) in IN_PLACE_OF and _is_untouched(c)]
    for callback in replaced:  # Lightning would report each override
        callbacks.remove(callback)
    return [IN_PLACE_OF[type(callback)]() for callback in replaced]


def _is_untouched(callback: Callback) -> bool:
    """Return True for a callback as the Trainer makes it, without arguments."""
    return vars(callback) == vars(type(callback)())


def _has_data(*kinds: type) -> Callable[[Trainer], bool]:
    return lambda trainer: isinstance(datamodule_of(trainer), kinds)


def _trains(trainer: Trainer) -> bool:
    data, module = datamodule_of(trainer), trainer.lightning_module
    # A rerun writes no results and warns of nothing, as the recorded run did.
    repeats = data is None or getattr(data, "is_rerun", False)
    return trainer.state.fn == "fit" and isinstance(module, RecordingModule) and not repeats


def _leaves_results(trainer: Trainer) -> bool:
    return _trains(trainer) and not is_fast_dev_run(trainer)


def _leaves_rollouts(trainer: Trainer) -> bool:
    of_rollouts = _has_data(RLDataModule, OfflineDataModule)(trainer)
    return of_rollouts and _leaves_results(trainer) and bool(trainer.loggers)


def _supervised(trainer: Trainer) -> bool:
    """Return True where Lightning's epochs and validations are those that callbacks look at."""
    module = trainer.lightning_module
    return isinstance(module, SupervisedModule) or not isinstance(module, RecordingModule)


DEFAULTS: dict[type[RLCallback], Callable[[Trainer], bool]] = {
    WeightSync: _has_data(RLDataModule),
    Watchdog: _has_data(CollectingDataModule),
    RerunRecorder: _leaves_rollouts,
    StopWhenTold: lambda trainer: True,
    LearningAlarms: lambda trainer: _trains(trainer) and not _supervised(trainer),
    RunReport: _leaves_results,
}
"""Callbacks that a run gets unless it has one of that class, and which runs do.

``IterationCheckpoint`` comes earlier, by :func:`use_own_saver`; display and monitors follow
Lightning's callbacks.
"""


def default_callbacks(trainer: Trainer) -> list[Callback]:
    """Prepare a run of this library, and return the callbacks that it gets unless it has them.

    ``WeightSync`` is put before all others, which use the engine with the weights that it pushed.
    Rollouts, rewards and engines open connections, so the number of files is raised to what is
    allowed.

    Raises:
        ConfigError: if a given callback does not work with the module.
    """
    callbacks = callbacks_of(trainer)
    added: list[RLCallback] = []
    for kind, belongs in DEFAULTS.items():
        present = find_callbacks(trainer, kind)
        if belongs(trainer) and not present:
            added.append(kind())
            added[-1].by_default = True
        elif not belongs(trainer):  # but to an earlier run of this Trainer
            callbacks[:] = [c for c in callbacks if c not in present or not c.by_default]
    _refuse_language_only(trainer)
    raise_file_limit()
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # else the user's own
        trainer.strategy.checkpoint_io = VerifiedCheckpointIO()
    callbacks[:0] = [c for c in added if isinstance(c, WeightSync)]
    judge_last(trainer)
    stops = [] if _supervised(trainer) else StopEarly.where_needed(trainer)
    watch(trainer)
    rest = [c for c in added if not isinstance(c, WeightSync)]
    return [*stops, *own_display(trainer), *rest]


def use_own_saver(trainer: Trainer) -> None:
    """Replace the ``ModelCheckpoint`` that the Trainer made by an ``IterationCheckpoint``.

    It has to be there before Lightning looks for ``ckpt_path="last"``. One without any argument
    counts as the Trainer's; with ``enable_checkpointing=False`` there is none.
    """
    callbacks, module = callbacks_of(trainer), trainer.lightning_module
    savers = find_callbacks(trainer, Checkpoint)
    theirs = len(savers) == 1 and type(savers[0]) is ModelCheckpoint and _is_untouched(savers[0])
    if theirs and isinstance(module, RecordingModule) and not is_fast_dev_run(trainer):
        callbacks[callbacks.index(savers[0])] = IterationCheckpoint(module.default_save_every)


def _refuse_language_only(trainer: Trainer) -> None:
    module = trainer.lightning_module
    if isinstance(module, LanguageModule | RolloutModule):
        return
    for callback in find_callbacks(trainer, RLCallback):
        if callback.language_only:
            raise ConfigError(
                f"{type(callback).__name__} works only with language models, but "
                f"{type(module).__name__} trains none; remove the callback"
            )


def judge_last(trainer: Trainer) -> None:
    """Let guards of metrics follow all callbacks that may record one; checkpoints follow them."""
    callbacks_of(trainer).sort(
        key=lambda c: 2 if isinstance(c, Checkpoint) else int(isinstance(c, MetricGuard))
    )


def watch(trainer: Trainer) -> None:
    """Put those before Lightning's callbacks that see to it that they do what they are for."""
    callbacks = callbacks_of(trainer)
    if find_callbacks(trainer, KnownMonitors):
        return
    follow = [
        *find_callbacks(trainer, ModelCheckpoint),
        *find_callbacks(trainer, HFExport),
        *(one for one in find_callbacks(trainer, EarlyStopping) if one.strict),
    ]
    callbacks[:0] = [
        KnownMonitors(follow),
        *map(SoundAverages, find_callbacks(trainer, WeightAveraging)),
    ]
