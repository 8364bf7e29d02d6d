"""Callbacks that every run of this library gets, in scripts and on the command line."""

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
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.callbacks.averages import SoundAverages
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.early_stopping import KnownMonitors, StopEarly
from lightning_rl.callbacks.export import HFExport
from lightning_rl.callbacks.guards import MetricGuard
from lightning_rl.callbacks.learning_alarms import LearningAlarms
from lightning_rl.callbacks.progress import RLProgressBar
from lightning_rl.callbacks.report import RunReport
from lightning_rl.callbacks.stopping import StopWhenTold
from lightning_rl.callbacks.weight_sync import WeightSync
from lightning_rl.config.lightning_flags import refuse_unasked_resuming
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.run.hooks import callbacks_of, datamodule_of, find_callbacks, is_fast_dev_run
from lightning_rl.run.noise import ignore_known_warnings
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
    replaced = [c for c in callbacks if type(c) in IN_PLACE_OF and vars(c) == vars(type(c)())]
    for callback in replaced:  # Lightning would report each override
        callbacks.remove(callback)
    return [IN_PLACE_OF[type(callback)]() for callback in replaced]


def basic_callbacks(trainer: Trainer) -> list[Callback]:
    """Return what any run of this library has: our display, and ``StopWhenTold``.

    Rollouts, rewards and engines open connections, so their number is raised to what is allowed.
    """
    refuse_unasked_resuming(trainer)
    raise_file_limit()
    watch(trainer)
    stops = [] if find_callbacks(trainer, StopWhenTold) else [StopWhenTold()]
    return [*own_display(trainer), *stops]


def default_callbacks(trainer: Trainer) -> list[Callback]:
    """Return what monitors need, the basic callbacks, and for a ``fit`` with a data module
    ``LearningAlarms`` and ``RunReport``.

    Callbacks that the trainer already has are kept. A rerun writes no results, as the recorded
    run's exist already.
    """
    judge_last(trainer)
    added = [*StopEarly.where_needed(trainer), *basic_callbacks(trainer)]
    data = datamodule_of(trainer)
    if trainer.state.fn == "fit" and data is not None and not getattr(data, "is_rerun", False):
        # A try-out leaves no results behind.
        wanted = [LearningAlarms] if is_fast_dev_run(trainer) else [LearningAlarms, RunReport]
        added += [make() for make in wanted if not find_callbacks(trainer, make)]
    return added


def rl_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a run of ``PolicyModule``, after adding a ``WeightSync``."""
    push_weights(trainer)
    return default_callbacks(trainer)


def supervised_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a run that learns from fixed rows: the basic ones and ``RunReport``.

    Its epochs and validations are Lightning's, at whose ends Lightning's callbacks look.
    """
    judge_last(trainer)
    added = basic_callbacks(trainer)
    fits = trainer.state.fn == "fit" and datamodule_of(trainer) is not None
    if fits and not is_fast_dev_run(trainer) and not find_callbacks(trainer, RunReport):
        added.append(RunReport())
    return added


def env_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a run whose policy is not a language model, and so has no engine.

    Raises:
        ConfigError: if a given callback works with language models only.
    """
    for callback in find_callbacks(trainer, RLCallback):
        if callback.language_only:
            module = type(trainer.lightning_module).__name__
            raise ConfigError(
                f"{type(callback).__name__} works only with language models, but "
                f"{module} trains none; remove the callback"
            )
    return default_callbacks(trainer)


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


def push_weights(trainer: Trainer) -> None:
    """Add a ``WeightSync`` if there is an engine and none was given.

    It is the first callback, since those after it use the engine with the weights that it pushed.
    """
    callbacks = callbacks_of(trainer)
    for earlier in find_callbacks(trainer, _DefaultSync):  # it says nothing about this run
        callbacks.remove(earlier)
    if isinstance(datamodule_of(trainer), RLDataModule) and not find_callbacks(trainer, WeightSync):
        callbacks.insert(0, _DefaultSync())


class _DefaultSync(WeightSync):
    """A ``WeightSync`` that this library added."""
