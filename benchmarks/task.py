"""The quickstart's task, as benchmarks build and run it."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rl import (
    GRPO,
    JSONLPrompts,
    PolicyModule,
    RLDataModule,
    Sampling,
    VLLMLocal,
)
from lightning_rl.engines.base import Engine
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


def make_module(model: Path = MODEL, lr: float = LR, **options: Any) -> PolicyModule:
    """GRPO; ``options`` of :class:`PolicyModule`."""
    return PolicyModule(
        str(model),
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0, fused=True),
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
    """One epoch of so many iterations; ``options`` of :class:`RLDataModule`."""
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


def fit(
    module: PolicyModule, data: RLDataModule, callbacks: Sequence[Callback], logs: bool = True
) -> None:
    """One epoch on the CPU, without bars and checkpoints; what it writes is deleted."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=TensorBoardLogger(directory) if logs else False,
            default_root_dir=directory,
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=data)


class KeptEngine(VLLMLocal):
    """One engine for several runs; ``VLLMLocal.close(engine)`` ends it."""

    def close(self) -> None:
        self.version = -1
