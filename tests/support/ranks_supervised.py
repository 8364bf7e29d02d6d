"""Run a process of a supervised run among several, in float64."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from tests.support.doubles import Doubled
from tests.support.resumed import without_times
from tests.support.small_run import trainer_of
from tests.support.supervised import LEARNERS, doubling

ROWS, EPOCHS = 13, 2
"""Two processes cannot share the rows evenly, with a last step of 5 rows."""


class SaveAt(Callback):
    """Saves once so many optimizer steps have been taken, within the next one."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.step = -1


def trained(
    model: str,
    kind: str,
    batch_size: int,
    accumulate: int,
    where: Path,
    save_at: int = -1,
    ckpt_path: str | None = None,
) -> dict[str, Any]:
    """Return rows of metrics by iteration, weights as lists, and the folder."""
    rows: dict[int, dict[str, float]] = {}
    seen = LambdaCallback()
    seen.on_iteration_end = lambda trainer, module, row: rows.setdefault(  # type: ignore[attr-defined]
        module.iteration, {}
    ).update(without_times(row))
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    module, data = LEARNERS[kind](model, ROWS, batch_size)
    module.allow_changes = ["data.batch_size"]  # which the number of processes makes up for
    saver = SaveAt(save_at, where / "saved.ckpt")
    # Lightning's threads of the backward pass compute outside of the mode.
    trainer = trainer_of(
        where, [seen, doubling(), saver], logger=False, max_epochs=EPOCHS, devices=ranks,
        strategy="ddp" if ranks > 1 else "auto", accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
    )  # fmt: skip
    with Doubled():
        trainer.fit(module, data, ckpt_path=ckpt_path)
    weights = {name: p.detach().tolist() for name, p in module.named_parameters()}
    return {"rows": rows, "weights": weights, "where": where}
