"""Supervised runs that were interrupted anywhere end as one that was not, to the last bit.

Each learner runs once whole, and leaves a checkpoint in every hook in which a run can be saved:
within accumulated batches, after a step, before, in and after a validation, at an epoch's last
step, at its end, and before the next. From each of them it is resumed. How a run is stopped is for
test_kill.py and test_stops.py.
"""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, GradientAccumulationScheduler

from benchmarks.kill.compare import differences
from lightning_rl.callbacks import RunReport
from tests.support.resumed import without_times
from tests.support.small_run import trainer_of
from tests.support.supervised import LEARNERS
from tests.support.tiers import slow

ROWS, BATCH, PER_STEP, EPOCHS = 14, 2, 2, 2
"""7 batches an epoch, in steps of 2, 2, 2 and 1 batches."""
HALFWAY = {"val_check_interval": 4}
"""A validation after the second step."""
AT_THE_END = {"val_check_interval": 1.0}
PLACES = {
    "batch begins": HALFWAY, "within a step": HALFWAY, "within the first step": HALFWAY,
    "step": HALFWAY, "step before a validation": HALFWAY, "validation": HALFWAY,
    "validated": HALFWAY, "last step": HALFWAY, "last step before a validation": AT_THE_END,
    "last validation": AT_THE_END, "last validated": AT_THE_END, "epoch's end": AT_THE_END,
    "next epoch": AT_THE_END, "next epoch's first step": AT_THE_END,
}  # fmt: skip


class Saves(Checkpoint):
    """Saves once in each place of the first epoch, and of the first batch of the next.

    As a ``Checkpoint`` it comes after the callbacks whose state it saves.
    """

    def __init__(self) -> None:
        self.saved: set[str] = set()

    def save(self, trainer: Any, *places: str) -> None:
        for place in places:
            if place not in self.saved and trainer.world_size == 1:
                self.saved.add(place)
                trainer.save_checkpoint(f"{trainer.default_root_dir}/{place}.ckpt")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 2:
            self.save(trainer, "batch begins")
        if trainer.current_epoch == 1:
            self.save(trainer, "next epoch's first step")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        within = not module.iteration_ended
        if within and batch_idx == 0:
            self.save(trainer, "within the first step")
        elif within:
            self.save(trainer, "within a step")
        elif batch_idx + 1 == trainer.num_training_batches:
            self.save(trainer, "last step", "last step before a validation")
        elif batch_idx + 1 == HALFWAY["val_check_interval"]:
            self.save(trainer, "step before a validation")
        else:
            self.save(trainer, "step")

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            self.save(trainer, "validation", "last validation")

    def on_validation_end(self, trainer, module):
        self.save(trainer, "validated", "last validated")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "epoch's end")

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.save(trainer, "next epoch")


class Noise(Callback):
    """Draws for every batch, and lets the draw of a step's last batch change its gradient."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.drawn = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002

    def on_before_optimizer_step(self, trainer, module, optimizer):
        for parameter in module.policy.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 + self.drawn


def run(kind, model, place, *callbacks, seed=0, ckpt_path=None, change=None, more=list, **options):
    """Train in a folder; rows of metrics, and the last checkpoint's state."""
    place.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(0 if ckpt_path is None else seed)
    decayed = {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)}
    module, data = LEARNERS[kind](model, ROWS, BATCH, **decayed)
    if change is not None:
        change(module)
    stopper = EarlyStopping(f"{kind}/val_loss", patience=100)
    report = RunReport()
    trainer = trainer_of(
        place, [stopper, report, Noise(), *more(), *callbacks],
        **{"logger": False, "max_epochs": EPOCHS, "num_sanity_val_steps": 0} | options,
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(place / "end.ckpt")
    saved = torch.load(place / "end.ckpt", weights_only=True)
    state = {name: saved[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")}
    state |= {name: saved["lightning_rl"][name] for name in ("iteration", "random", "place")}
    state |= {"global_step": saved["global_step"], "epoch": saved["epoch"]}
    stopped = [v for name, v in saved["callbacks"].items() if "EarlyStopping" in name]
    return {"state": state, "stopper": stopped, "rows": list(map(without_times, report.history))}


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """Return the run of a learner that nothing interrupts, with its checkpoints."""

    @cache
    def made(kind, **options):
        place = tmp_path_factory.mktemp("whole")
        return place, run(kind, tiny_model, place, Saves(), **options)

    return made


def require_same(ours, theirs):
    found = differences(ours, theirs, "")
    assert not found, f"the resumed run differs in {found[:5]}"


QUICK = {"sft": list(PLACES), "kto": ["within a step", "validation"], "dpo": ["step"], "rm": []}
"""The other learners have only a few cases: what differs among them is little."""


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (kind, place) if place in QUICK[kind] else slow(kind, place)
        for kind in LEARNERS
        for place in PLACES
    ],
)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    whole, tiny_model, tmp_path, kind, place
):
    options = {"accumulate_grad_batches": PER_STEP} | PLACES[place]
    folder, expected = whole(kind, **options)
    ckpt_path = folder / f"{place}.ckpt"
    require_same(run(kind, tiny_model, tmp_path, seed=9, ckpt_path=ckpt_path, **options), expected)


def scheduled():
    return [GradientAccumulationScheduler({0: 3, 1: 2})]


class OnPlateau:
    """A learner whose learning rate falls by epoch or by step, as a monitored loss says."""

    def __init__(self, interval):
        self.interval = interval

    def __call__(self, module):
        make = module.configure_optimizers

        def configured():
            optimizer = make()["optimizer"]
            monitored = {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.5, patience=0, threshold=0.5
                ),
                "interval": self.interval, "monitor": "sft/val_loss", "strict": False,
            }  # fmt: skip
            return {"optimizer": optimizer, "lr_scheduler": monitored}

        module.configure_optimizers = configured


VARIANTS = {
    "max_steps": {"accumulate_grad_batches": PER_STEP, "max_steps": 6, "max_epochs": -1},
    "one batch a step": {"accumulate_grad_batches": 1},
    "a schedule of accumulation": {"more": scheduled},
    "a plateau by epoch": {"accumulate_grad_batches": PER_STEP, "change": OnPlateau("epoch")},
    "a plateau by step": {"accumulate_grad_batches": PER_STEP, "change": OnPlateau("step")},
    "fewer batches": {"accumulate_grad_batches": PER_STEP, "limit_train_batches": 5},
    "in total": {"accumulate_grad_batches": PER_STEP, "check_val_every_n_epoch": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_so_does_it_whatever_lightning_is_told(whole, tiny_model, tmp_path, variant, place):
    options = VARIANTS[variant] | PLACES[place]
    if "check_val_every_n_epoch" in options:
        options |= HALFWAY
    folder, expected = whole("sft", **options)
    ckpt_path = folder / f"{place}.ckpt"
    if not ckpt_path.exists():
        pytest.skip(f"a run with {variant} has no such place")
    require_same(run("sft", tiny_model, tmp_path, seed=9, ckpt_path=ckpt_path, **options), expected)
