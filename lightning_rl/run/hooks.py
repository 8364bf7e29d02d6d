"""Hooks in addition to Lightning's."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.profilers import PassThroughProfiler

T = TypeVar("T", bound=Callback)

# A Trainer has these, but does not declare them.


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the run's own list of callbacks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_callbacks(trainer: Trainer, kind: type[T]) -> list[T]:
    """Return the run's callbacks of a class, in order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    """Return the run's data module; None if it was given dataloaders."""
    result: LightningDataModule | None = getattr(trainer, "datamodule", None)
    return result


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Return True for a fast dev run, which leaves no files behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def call_hook(trainer: Trainer, hook: str, *arguments: Any) -> None:
    """Call a hook of ``RLCallback`` on every callback that has it, in order."""
    list(answers(trainer, hook, *arguments))


def answers(
    trainer: Trainer, hook: str, *arguments: Any, module: LightningModule | None = None
) -> Iterator[Any]:
    """Like :func:`call_hook`, but yield each result that is not None before the next callback is
    called.

    ``module`` is passed to the callbacks in place of the trainer's.
    """
    for callback in callbacks_of(trainer):
        if hasattr(callback, hook):
            receiver = module or trainer.lightning_module
            answer = getattr(callback, hook)(trainer, receiver, *arguments)
            if answer is not None:
                yield answer


def _defaults() -> Any:
    """Return ``callbacks/defaults.py``.

    It is found by name, as in a configuration: callbacks import the modules, not the other way
    round.
    """
    return import_module("lightning_rl.callbacks.defaults")


def default_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks that a run gets unless it has them."""
    added: list[Callback] = _defaults().default_callbacks(trainer)
    return added


def use_own_saver(trainer: Trainer) -> None:
    """Save checkpoints as this library does, unless the user chose how."""
    _defaults().use_own_saver(trainer)


class _Unprofiled(PassThroughProfiler):
    """Lightning's no-op profiler, without a generator for each hook."""

    _context = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._context


def skip_profiling(trainer: Trainer) -> None:
    """Call hooks directly if no profiler was given: a short iteration has 200 of them."""
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
        trainer.profiler = _Unprofiled()  # type: ignore[attr-defined]


def last_iteration(trainer: Trainer, iteration: int) -> float:
    """Return the iteration that this run ends with; infinite if its epochs do not determine it.

    ``iteration`` is the number that the module has trained so far. It may have begun with another
    Trainer, whose iterations are not part of this run.
    """
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if trainer.lightning_module.automatic_optimization:  # iterations are optimizer steps
        schedules = find_callbacks(trainer, GradientAccumulationScheduler)
        if any(schedule.going_to_accumulate_grad_batches() for schedule in schedules):
            return math.inf
        return iteration - trainer.global_step + trainer.estimated_stepping_batches
    if epochs is None or epochs <= 0:
        return math.inf
    before = iteration - trainer.fit_loop.epoch_loop.batch_progress.total.ready
    return before + epochs * batches
