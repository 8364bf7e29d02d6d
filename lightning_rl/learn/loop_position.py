"""Where a run of fixed rows is in Lightning's loops, so that it resumes from any hook exactly.

Lightning restores the counters of its loops as they were, and decides from them what is left to do.
In the middle of accumulated batches, before a validation that is due, or at an epoch's end, that is
not what the uninterrupted run would have done. So the counters are derived from the loader's
position, and what was left to do after the last step is done first.
"""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fit_loop import RestartStage

from lightning_rl.learn.windows import Windows
from lightning_rl.run.hooks import find_callbacks

Position = dict[str, Any]
"""Primitives that say where a run is; see :func:`position_of`."""


def position_of(trainer: Trainer, loader: Windows, validated: bool) -> Position:
    """Return where a run is.

    - ``epoch``, ``batches``: as many batches of this epoch were trained on;
    - ``row``: the same in rows, which holds for any number of ranks;
    - ``total``: batches of all epochs;
    - ``left``: the last step is taken, and what Lightning does after it may not be done;
    - ``validated``: of that, the validation is done, if there is one;
    - ``ending``: the epoch is over, but for schedules by epoch;
    - ``metrics``: the latest of each, for callbacks and schedules that monitor one.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    within = progress.started > progress.processed
    over = loader.ended and not within
    return {
        "epoch": loader.epoch + over,
        "row": 0 if over else loader.row,
        "batches": 0 if over else loader.batches,
        "total": batches.total.ready - batches.current.ready + loader.batches,
        "left": within and loader.batches > 0 and not loader.untrained,
        "validated": validated,
        "ending": progress.processed > progress.completed,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def rewind(position: Position, loops: dict[str, Any]) -> None:
    """Set the counters of a checkpoint's loops to a position."""
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    before = epochs["total"]["processed"] - epochs["current"]["processed"]  # by an earlier fit
    begun = position["batches"] > 0
    epochs["current"] = _counted(position["epoch"], begun)
    epochs["total"] = _counted(before + position["epoch"], begun)
    batches["current"], batches["total"] = (
        _counted(position["batches"]),
        _counted(position["total"]),
    )
    batches["is_last_batch"] = False


def _counted(done: int, begun: bool = False) -> dict[str, int]:
    return {"ready": done + begun, "started": done + begun, "processed": done, "completed": done}


def continue_at(trainer: Trainer, loader: Windows, position: Position) -> None:
    """Do what was left to do at a position, and let Lightning go on with the batch after it.

    Call it at the end of ``on_train_start``.
    """
    fit: Any = trainer.fit_loop
    steps = fit.epoch_loop
    for loop in (fit, steps, steps.val_loop):
        loop._restarting = False
        loop.reset_restart_stage()
    for scheduler in find_callbacks(trainer, GradientAccumulationScheduler):
        scheduler.on_train_epoch_start(trainer)
    loader.load_state_dict(position)
    values = position["metrics"].items()
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values})
    # There may be another number of ranks, and so of batches.
    steps.batch_progress.increment_by(loader.batches - position["batches"], loader.ended)
    if position["ending"]:
        steps.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    if position["left"]:
        steps._skip_next_val = position["validated"]
        steps.on_advance_end(fit._data_fetcher)
        if loader.ended:
            fit.on_advance_end()
            return
    if loader.batches:
        fit._restart_stage = RestartStage.RESTARTED_MID_EPOCH
        steps._restarting = True
        # Lightning counts a step more when it restarts.
        steps._batches_that_stepped -= not steps._should_accumulate()
