"""Runs on a pretended device: everything is where it must be, and the numbers are the CPU's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from transformers.integrations import accelerate

from lightning_rl import (
    GAE,
    BaseReference,
    DPOModule,
    EntropyBonus,
    HFExport,
    IterablePrompts,
    IterationCheckpoint,
    K1Penalty,
    K3Penalty,
    LoRA,
    PairDataModule,
    SeparateValueHead,
    SFTDataModule,
    SFTModule,
    TokenTIS,
    WeightSync,
)
from lightning_rl.callbacks import (
    Correct,
    EffectiveSampleGuard,
    KLGuard,
    LogprobGapGuard,
    LogprobSpikeGuard,
    Mask,
    RLCallback,
    SkipUpdate,
    StalenessGuard,
    ZeroAdvantageGuard,
)
from lightning_rl.extend import Policy
from lightning_rl.models.attention import short_segments as short_attention
from tests.support.pretended import DEVICE, moving_in_place, on_the_device
from tests.support.small_run import adamw, data_module, grpo, ppo, trainer_of


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    monkeypatch.setattr(short_attention, "MOST_KEYS", 0)  # of CPUs alone, so others round otherwise
    with moving_in_place():
        yield


class Watch(RLCallback):
    """Records where parameters and batches were, and metrics."""

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


def fitted(
    module: LightningModule,
    tmp_path: Path,
    *callbacks: Any,
    iterations: int = 1,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Watch:
    """Fit iterations on rollouts of the module's own."""
    torch.manual_seed(0)  # of adapters' first weights
    watch = Watch()
    trainer = trainer_of(tmp_path, [WeightSync(), *callbacks, watch], logger=False, **options)
    data = data_module(iterations_per_epoch=iterations, groups_per_iteration=2, group_size=4)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return watch


def require_equal(ours: LightningModule, theirs: LightningModule) -> None:
    """Require that a run on the device has the weights of one on the CPU, bit for bit."""
    theirs_of = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.equal(weight.cpu(), theirs_of[name].cpu()), name


def test_grpo_without_accelerate(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: False)
    ours, theirs = grpo(tiny_model), grpo(tiny_model)
    watch = fitted(ours, tmp_path, iterations=2, **on_the_device())
    assert watch.places == {DEVICE}
    assert len(watch.metrics) == 3
    assert watch.metrics == fitted(theirs, tmp_path, iterations=2).metrics
    require_equal(ours, theirs)


def test_the_engine_follows(tiny_model, tmp_path):
    """The test runs in bfloat16, and with a LoRA, which is merged on the device.

    Single tokens prove nothing: an order of adding takes one 0.2 nats away.
    """
    watch = fitted(lora(tiny_model), tmp_path, **on_the_device("bf16-mixed"))
    assert 0 < watch.metrics[1]["sync/probe_gap_mean"] < 0.1


def critics(tiny_model):
    return grpo(tiny_model, advantage=GAE(), critic=SeparateValueHead(), kl_reward=K1Penalty())


def everything(tiny_model):
    return ppo(tiny_model, kl=K3Penalty(), entropy=EntropyBonus(), correction=TokenTIS())


def lora(tiny_model):
    return grpo(tiny_model, lora=LoRA(), kl=K3Penalty(), reference=BaseReference(), minibatches=2)


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        *((grpo, precision) for precision in ("bf16-mixed", "bf16-true")),  # and above
        *((everything, precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
        *((critics, precision) for precision in ("32-true", "bf16-true")),
        *((lora, precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
    ],
)
def test_a_precision(make, precision, tiny_model, random_batch, train_on):
    """GRPO, PPO, critics, LoRA and penalties on the device learn what they do on the CPU."""
    batch, runs = random_batch(3, groups=2), []
    for options in (on_the_device(precision), {"precision": precision}):
        torch.manual_seed(0)  # of adapters' first weights
        module, watch = make(tiny_model), Watch()
        train_on(module, [batch.clone()], callbacks=[watch], **options)
        runs.append((module, watch))
    (ours, seen), (theirs, expected) = runs
    assert seen.places == {DEVICE}
    assert seen.metrics == expected.metrics
    dtypes = {parameter.dtype for parameter in ours.parameters()}
    assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    require_equal(ours, theirs)


@pytest.mark.parametrize(
    "guards",
    [
        [LogprobSpikeGuard(1.0, Mask()), StalenessGuard(0, Mask()), KLGuard()],
        [LogprobGapGuard(0.1, Correct(TokenTIS())), ZeroAdvantageGuard(0.0, patience=1)],
        [EffectiveSampleGuard(1.0, SkipUpdate()), LogprobGapGuard(0.1, Mask())],
    ],
    ids=["mask", "correct", "skip"],
)
def test_guards_and_their_actions(guards, tiny_model, random_batch, train_on):
    batch, runs = random_batch(3), []
    batch["tokens", "versions"] = batch["tokens", "versions"] - 1
    for options in (on_the_device(), {}):
        module, watch = grpo(tiny_model), Watch()
        train_on(module, [batch.clone()], callbacks=[*copy.deepcopy(guards), watch], **options)
        runs.append((module, watch.metrics))
    (ours, seen), (theirs, expected) = runs
    assert seen == expected
    assert sum(name.startswith("guard/") for name in seen[1]) >= 2
    require_equal(ours, theirs)


def test_a_resumed_run_ends_where_the_whole_one_does(tiny_model, tmp_path):
    """The float32 copies of bfloat16 weights are in the checkpoint; the result is exported, too."""
    options = {"enable_checkpointing": True, **on_the_device("bf16-true")}
    whole, resumed = ppo(tiny_model), ppo(tiny_model)
    saver, export = IterationCheckpoint(1, dirpath=str(tmp_path)), HFExport(str(tmp_path / "hf"))
    fitted(whole, tmp_path, saver, export, iterations=2, **options)
    first = tmp_path / "iteration_1.ckpt"
    state = torch.load(first, weights_only=True)["optimizer_states"][0]["state"]
    assert {entry["master_weight"].dtype for entry in state.values()} == {torch.float32}
    fitted(resumed, tmp_path, iterations=2, ckpt_path=first, **on_the_device("bf16-true"))
    require_equal(resumed, whole)
    exported = Policy(str(tmp_path / "hf")).lm.state_dict()
    for name, weight in whole.policy.lm.state_dict().items():
        assert torch.equal(exported[name], weight.cpu().float()), name


ROWS = [
    {"prompt": f"{n}=", "completion": f"{n}"[::-1], "chosen": f"{n}"[::-1], "rejected": f"{n}"}
    for n in range(100, 112)
]


@pytest.mark.parametrize(
    ("kind", "data", "precision"),
    [
        *((SFTModule, SFTDataModule, precision) for precision in ("32-true", "bf16-true")),
        *((DPOModule, PairDataModule, precision) for precision in ("bf16-mixed", "bf16-true")),
    ],
)
def test_supervised_training(kind, data, precision, tiny_model, tmp_path):
    runs = []
    for options in (on_the_device(precision), {"precision": precision}):
        module = kind(str(tiny_model), optimizer=adamw(1e-3))
        rows = data(IterablePrompts(ROWS), IterablePrompts(ROWS[:4]), batch_size=6, seed=1)
        trainer = trainer_of(tmp_path, [], logger=False, gradient_clip_val=1.0, **options)
        trainer.fit(module, rows)
        runs.append((module, {name: float(v) for name, v in trainer.callback_metrics.items()}))
    (ours, seen), (theirs, expected) = runs
    assert seen == expected
    assert len(seen) >= 2
    require_equal(ours, theirs)
