"""Define the quickstart's task, as benchmarks build and run it."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rl import (
    GRPO,
    JSONLPrompts,
    PolicyModule,
    RLDataModule,
    Rollout,
    Sampling,
    UpdateSettings,
    VLLMLocal,
)
from lightning_rl.agents.base import SingleTurn, new_rollouts
from lightning_rl.callbacks import RLCallback
from lightning_rl.engines.base import Engine
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.rollout import Prompt
from lightning_rl.run.loop.background import run_async
from recipes.sort_digits.reward import exact_match

OUT = Path("runs/sort_digits")
MODEL = OUT / "sft" / "hf"
LR = 1e-4
GROUPS, GROUP_SIZE = 32, 8
SAMPLING = Sampling(max_tokens=10)


def prepare() -> None:
    """Make the quickstart's data and warm-started model, if they are not there yet."""
    commands = [["recipes.sort_digits.prepare"]]
    if not (MODEL / "config.json").exists():
        commands.append(["lightning_rl", "fit", "--config", "recipes/sort_digits/sft.yaml"])
    for command in commands:
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


def make_module(
    model: Path = MODEL,
    lr: float = LR,
    minibatches: int = 1,
    seed: int | None = None,
    **options: Any,
) -> PolicyModule:
    """Make a GRPO module; ``options`` are :class:`PolicyModule`'s."""
    return PolicyModule(
        str(model),
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0, fused=True),
        update=UpdateSettings(minibatches=minibatches, seed=seed),
        **options,
    )


def make_prompts(path: Path = OUT / "train.jsonl", seed: int | None = None) -> JSONLPrompts:
    return JSONLPrompts(str(path), seed=seed)


def make_data(
    iterations: int,
    engine: Engine | None = None,
    prompts: Path = OUT / "train.jsonl",
    reward: Callable[..., Any] = exact_match,
    sampling: Sampling = SAMPLING,
    seed: int | None = None,
    **options: Any,
) -> RLDataModule:
    """Make an epoch of so many iterations; ``options`` are :class:`RLDataModule`'s."""
    return RLDataModule(
        make_prompts(prompts, seed),
        [reward],
        engine if engine is not None else VLLMLocal(max_model_len=32),
        sampling=sampling,
        group_size=GROUP_SIZE,
        groups_per_iteration=GROUPS,
        iterations_per_epoch=iterations,
        seed=seed,
        **options,
    )


def sampled(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, seed: int
) -> list[Rollout]:
    """Return four completions of each prompt."""
    rollouts = new_rollouts(prompts, 4, sampling, seed, iteration=-2)

    async def run() -> None:
        await asyncio.gather(*(SingleTurn().run(one, engine, sampling) for one in rollouts))

    run_async(run())
    return rollouts


def quiet_trainer(
    directory: Path | str, callbacks: Sequence[Callback] = (), **options: Any
) -> Trainer:
    """Make a trainer of one epoch on the CPU, without bars, logs and checkpoints."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(default_root_dir=directory, callbacks=list(callbacks), **given | options)


def fit(
    module: RolloutModule,
    data: RLDataModule,
    callbacks: Sequence[Callback],
    logs: bool = True,
    **options: Any,
) -> None:
    """Fit one epoch on the CPU, and delete what it writes. ``options`` of Lightning's Trainer."""
    with tempfile.TemporaryDirectory() as directory:
        logger = TensorBoardLogger(directory) if logs else False
        trainer = quiet_trainer(directory, callbacks, logger=logger, **options)
        trainer.fit(module, datamodule=data)


class Rows(RLCallback):
    """Keeps a row of figures per iteration, and the rollouts that were collected last."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.rollouts: list[Rollout] = []

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.rollouts = rollouts


class KeptEngine(VLLMLocal):
    """One engine for several runs: a run neither starts it again nor ends it."""

    def close(self) -> None:
        self.version = -1

    def end(self) -> None:
        super().close()
