"""Runs on a pretended device: everything is where it must be, and the numbers are the CPU's."""

import pytest
import torch
from lightning.pytorch import LightningModule
from transformers.integrations import accelerate

from lightning_rl.callbacks import WeightSync
from lightning_rl.hooks import RLCallback
from lightning_rl.models import policy
from tests.pretended import DEVICE, moving_in_place, on_the_device
from tests.small_run import data_module, grpo, trainer_of


@pytest.fixture(autouse=True)
def in_place():
    with moving_in_place():
        yield


class Watch(RLCallback):
    """Where parameters and batches were, and what was recorded."""

    def __init__(self):
        self.places = set()
        self.metrics = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        tensors = [*pl_module.parameters(), *batch.values(True, True)]
        self.places.update(tensor.device for tensor in tensors)

    def on_iteration_end(self, trainer, pl_module, metrics):
        timed = ("time/", "sync/seconds", "rollout/tokens_per_s")
        kept = {name: value for name, value in metrics.items() if not name.startswith(timed)}
        self.metrics[pl_module.iteration] = kept


def fitted(module: LightningModule, tmp_path, **options) -> Watch:
    """Two iterations on rollouts of the module's own."""
    watch = Watch()
    trainer = trainer_of(tmp_path, [WeightSync(), watch], logger=False, **options)
    data = data_module(iterations_per_epoch=2, groups_per_iteration=2, group_size=4)
    trainer.fit(module, data)
    return watch


def require_equal(ours: LightningModule, theirs: LightningModule) -> None:
    """Of a run on the device and one on the CPU, all weights, bit for bit."""
    theirs_of = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.equal(weight.cpu(), theirs_of[name].cpu()), name


def test_grpo_without_accelerate(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: False)
    monkeypatch.setattr(policy, "find_spec", lambda name: None)
    ours, theirs = grpo(tiny_model), grpo(tiny_model)
    watch = fitted(ours, tmp_path, **on_the_device())
    assert watch.places == {DEVICE}
    assert len(watch.metrics) == 3
    assert watch.metrics == fitted(theirs, tmp_path).metrics
    require_equal(ours, theirs)
