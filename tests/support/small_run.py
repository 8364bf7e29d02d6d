"""Provide a run of seconds: the tiny model learns to write sevens."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import GAE
from lightning_rl.callbacks import RLCallback
from lightning_rl.collect.evaluation import Evaluation
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped


def share_of_sevens(completions, completion_ids, **columns):
    """Return the share of sevens in [0, 1]; the end token counts as no seven."""
    pairs = zip(completions, completion_ids, strict=True)
    return [text.count("7") / len(ids) for text, ids in pairs]


def numbers(*bounds: int, **options) -> IterablePrompts:
    """Return the prompts of a range of numbers."""
    return IterablePrompts([{"prompt": f"{n}="} for n in range(*bounds)], **options)


def data_module(evaluation=MappingProxyType({}), **options) -> RLDataModule:
    """Make a data module, with ``evaluation``: its settings, its prompts alone, or None."""
    held_out = {"prompts": numbers(100, 108), "samples": 4, "success_reward": 0.5}
    given = evaluation if isinstance(evaluation, Mapping) else {"prompts": evaluation}
    options = {
        "train_prompts": numbers(108, 140, seed=1),
        "evaluation": None if evaluation is None else Evaluation(**held_out | dict(given)),
        "rewards": [share_of_sevens],
        "engine": TransformersEngine(device="cpu"),
        "sampling": Sampling(max_tokens=6),
        "group_size": 8,
        "groups_per_iteration": 6,
        "iterations_per_epoch": 10,
        "seed": 7,
    } | options
    return RLDataModule(**options)


def trainer_of(tmp_path, callbacks=(), kind=Trainer, **options) -> Trainer:
    """Make a trainer of one epoch on the CPU; it prints nothing, and keeps only metrics."""
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": CSVLogger(tmp_path, "csv"),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    } | options
    return kind(callbacks=list(callbacks), default_root_dir=tmp_path, **options)


class Losses(Callback):
    """The losses of a run's steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(float(outputs["loss"].detach()))


def fit(module, data, tmp_path, **options) -> tuple[Trainer, list[float]]:
    """Train by automatic optimisation; the losses of the steps, too."""
    losses = Losses()
    trainer = trainer_of(tmp_path, [losses], logger=False, **options)
    trainer.fit(module, data)
    return trainer, losses.seen


class Rows(RLCallback):
    """Records every iteration's metrics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows.append(metrics)


class SaveAfter(Callback):
    """Saves a checkpoint after some iteration, where ``path`` is given."""

    def __init__(self, iteration: int, path=None) -> None:
        self.iteration, self.path = iteration, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.iteration == self.iteration and self.path is not None:
            trainer.save_checkpoint(self.path)


class StopAfter(SaveAfter):
    """Saves a checkpoint, and fails."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if pl_module.iteration == self.iteration:
            raise RuntimeError("power cut")


def adamw(lr: float):
    # On a device it would take all tensors at once, in another order of operations.
    return lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0, foreach=False)


def grpo(tiny_model, **options) -> PolicyModule:
    return PolicyModule(
        str(tiny_model), **grouped(**({"optimizer": adamw(1e-2), "seed": 7} | options))
    )


def ppo(tiny_model, **options) -> PolicyModule:
    options = {"optimizer": adamw(1e-2), "ppo_epochs": 2, "minibatches": 2, "seed": 7} | options
    return PolicyModule(
        str(tiny_model), advantage=GAE(), critic=SharedValueHead(detach=True), **grouped(**options)
    )
