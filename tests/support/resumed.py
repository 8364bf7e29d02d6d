"""Save, resume and compare runs: the one definition of two runs being equal."""

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from benchmarks.kill.compare import differences
from lightning_rl.callbacks import RLCallback
from lightning_rl.collect.loader import RolloutLoader
from tests.support.small_run import trainer_of

EPOCHS, PER_EPOCH = 2, 2
ITERATIONS = EPOCHS * PER_EPOCH
TRAINED = {"within": 1, "epoch": 2, "collected": 3}
"""The number of iterations trained on in each checkpoint that a whole run leaves."""


def is_time(name: str) -> bool:
    """Tell whether a metric is measured in, or per, seconds, and so differs from run to run."""
    return name.startswith(("time/", "cpu_s", "wall_s")) or name.endswith(("seconds", "_per_s"))


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """Set every time in a row of metrics to zero: its key has to be there all the same."""
    return {name: 0.0 if is_time(name) else value for name, value in row.items()}


class Trace(RLCallback):
    """Records batches, rollouts and rows of metrics of a run, by iteration (0 first)."""

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}
        self.rollouts: dict[int, list[dict]] = {}
        self.rows: dict[int, dict] = {}

    def on_update_start(self, trainer, pl_module, batch) -> None:
        # Pictures are among the rollouts, too.
        self.batches[pl_module.iteration] = batch.exclude("pictures").clone().to_dict()
        if isinstance(trainer.train_dataloader, RolloutLoader):
            rollouts = trainer.train_dataloader.current
            self.rollouts[pl_module.iteration] = [deepcopy(r.to_dict()) for r in rollouts]

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        row = self.rows.setdefault(pl_module.iteration, {})
        row.update(without_times(metrics))


class Saves(Callback):
    """Saves where runs are stopped: within an epoch, at its end, and with a batch in hand."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.current_epoch == 0 and batch_idx == TRAINED["within"] - 1:
            trainer.save_checkpoint("within.ckpt")

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("epoch.ckpt")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.current_epoch == 1 and batch_idx == TRAINED["collected"] - PER_EPOCH:
            trainer.save_checkpoint("collected.ckpt")


@dataclass
class Case:
    """The kind of run: a module of the model in a directory, data of two iterations an epoch."""

    module: Callable[[str], LightningModule]
    data: Callable[[], LightningDataModule]
    callbacks: Callable[[], list[Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    places: Sequence[str] = ("within", "collected")
    """The checkpoints that a run is resumed from."""
    model: str = "tiny_model"
    """The fixture with the model's directory."""


@dataclass
class Run:
    """A run that is over: where it took place, what was seen, and its last checkpoint."""

    place: Path
    trace: Trace
    module: LightningModule
    data: LightningDataModule
    end: dict[str, Any]


def run_case(
    case: Case, model: Path, place: Path, *callbacks: Callback, seed: int = 0, **options: Any
) -> Run:
    """Train in the directory ``place``; ``options``: the Trainer's, and ``ckpt_path``."""
    place.mkdir(exist_ok=True)
    ckpt_path = options.pop("ckpt_path", None)
    torch.manual_seed(seed)  # adapters and agents begin with drawn weights
    random.seed(seed)  # a checkpoint keeps all generators
    np.random.seed(seed)  # noqa: NPY002
    with chdir(place):
        trace, module, data = Trace(), case.module(str(model)), case.data()
        options = {"max_epochs": EPOCHS, "logger": False} | case.trainer | options
        end = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint("end.ckpt"))
        trainer = trainer_of(place, [*case.callbacks(), *callbacks, trace, end], **options)
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return Run(place, trace, module, data, state_of(place / "end.ckpt"))


def resume(case: Case, model: Path, whole: Run, checkpoint: str, place: Path) -> Run:
    """Resume from a checkpoint in a copy of the directory, as a kill later on would leave it.

    Whatever is drawn before the checkpoint is read is drawn otherwise.
    """
    shutil.copytree(whole.place, place)
    return run_case(case, model, place, seed=9, ckpt_path=checkpoint)


def state_of(path: Path) -> dict[str, Any]:
    """Return everything in a checkpoint that a run depends on."""
    saved = torch.load(path, weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers")
    data = [name for name in saved if name.endswith("DataModule")]
    for name in data:
        if buffer := saved[name].get("buffer"):
            # Numbers of rows in its file, where those of a run that was killed are not given again.
            del buffer["last"]
            buffer["places"] = len(buffer["places"])
    own = saved["lightning_rl"]
    return {
        **{name: saved[name] for name in (*kept, *data)},
        **{name: own[name] for name in ("iteration", "parts", "random")},
    }


def require_same_end(resumed: Run, whole: Run, trained: int) -> None:
    """Fail unless all of a resumed run after ``trained`` iterations is as in the whole one.

    To the bit: batches, rollouts, rows of metrics but for times, and the last checkpoint.
    """
    ours, theirs = resumed.trace, whole.trace
    found = differences(resumed.end, whole.end, "state")
    for name in ("batches", "rollouts", "rows"):
        seen, expected = getattr(ours, name), getattr(theirs, name)
        found += differences(seen, {n: expected[n] for n in seen}, name)
    assert not found, f"the resumed run differs in {found}"
    assert list(ours.batches) == list(theirs.batches)[trained:]
    assert set(list(theirs.rows)[trained + 1 :]) <= ours.rows.keys()
