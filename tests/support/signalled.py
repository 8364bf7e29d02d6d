"""Provide runs of several processes of which some get signals: what they are told, and by whom.

Each process is ``python -m lightning_rl fit``, started as torchrun or srun does. The callback here
sends its own process a signal at a place that the configuration names.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_rl.callbacks.base import RLCallback
from tests.support.bad_configs import CONFIG, furnish

SIGNALLED = f"{__name__}.Signalled"
FIT = ("fit", "--config", "run.yaml", "--ckpt_path", "last")
"""The command, which begins where no checkpoint is."""


class Signalled(RLCallback):
    """Sends its process signals.

    Args:
        at: ``rank place iteration signal``, such as ``1 learn 2 SIGUSR1``; places are ``setup``,
            ``collect`` and ``learn``.
    """

    def __init__(self, at: Sequence[str] = ()) -> None:
        self.at = list(at)

    def _send(self, trainer: Any, place: str, iteration: int) -> None:
        for plan in self.at:
            rank, where, when, name = plan.split()
            if (int(rank), where, int(when)) == (trainer.global_rank, place, iteration):
                print(f"rank {rank}: {name} to itself in {place} {iteration}", flush=True)
                os.kill(os.getpid(), getattr(signal, name))

    def setup(self, trainer, pl_module, stage) -> None:
        self._send(trainer, "setup", 0)

    def on_collect_start(self, trainer, pl_module) -> None:
        self._send(trainer, "collect", pl_module.present_iteration)

    def on_update_start(self, trainer, pl_module, batch) -> None:
        self._send(trainer, "learn", pl_module.present_iteration)


def configure(folder: Path, model: Path, *at: str, iterations: int = 4) -> Path:
    """Write a folder with a configuration for two processes, ``run.yaml``, and what it names."""
    folder.mkdir(exist_ok=True)
    furnish(folder, model)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "one"}}
    trainer = CONFIG["trainer"] | {
        "logger": logger,
        "enable_checkpointing": True,
        "devices": 2,
        "callbacks": [{"class_path": SIGNALLED, "init_args": {"at": list(at)}}],
    }
    data = CONFIG["data"]["init_args"] | {"iterations_per_epoch": iterations, "evaluation": None}
    configuration = CONFIG | {
        "trainer": trainer,
        "data": {"class_path": "RLDataModule", "init_args": data},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration))
    return folder


def checkpoints(folder: Path) -> Path:
    return folder / "runs" / "one" / "version_0" / "checkpoints"


def saved(folder: Path) -> list[str]:
    """Return names of a job's checkpoints."""
    return sorted(path.name for path in checkpoints(folder).glob("iteration_*.ckpt"))


def require_same_end(folder: Path, whole: Path) -> None:
    """Require that two jobs have the same weights after their fourth iteration, to the bit."""
    ours, theirs = (
        torch.load(checkpoints(job) / "iteration_4.ckpt", weights_only=True)["state_dict"]
        for job in (folder, whole)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
