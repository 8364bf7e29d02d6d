"""Provide guards that trip on one rank, commands of several processes, and a rerun by two."""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.callbacks import (
    BatchGuard,
    IterationCheckpoint,
    Mask,
    MetricGuard,
    RLCallback,
    SkipUpdate,
    StopRun,
    WeightSync,
)
from lightning_rl.cli import main
from lightning_rl.data.batch import token_rows
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import GuardError
from lightning_rl.module import PolicyModule
from lightning_rl.run.digest import digests
from lightning_rl.run.processes import dist
from tests.support.ranks_run import prompts, rows, share_of_even_digits
from tests.support.small_run import trainer_of


class OnRankOne(BatchGuard):
    """Trips in one iteration, on rank 1 alone; rank 0 has nothing to measure."""

    what = "a number of rank 1"

    def __init__(self, iteration: int, action: Any) -> None:
        super().__init__(0.5, action)
        self.iteration = iteration
        self.name = f"on_rank_one_{iteration}"

    def measure(self, module, batch):
        return float(module.iteration == self.iteration) if dist.rank() == 1 else None

    def offenders(self, module, batch):
        """Return the first rollout of rank 1."""
        return (token_rows(batch) == 0) & (dist.rank() == 1)


class Noted(RLCallback):
    """Records rows, and a metric that only rank 1 records."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if dist.rank() == 1:
            pl_module.record({"local/metric": float(pl_module.iteration)})

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows.append({n: v for n, v in metrics.items() if n.startswith(("guard/", "policy/"))})


def guarded(model: str, *, where: Path) -> dict[str, Any]:
    """Skips the first update, masks in the second, and stops after the third."""
    noted = Noted()
    guards = [
        OnRankOne(0, SkipUpdate()),
        OnRankOne(1, Mask()),
        MetricGuard("local/metric", 1.5, StopRun()),
    ]
    callbacks = [WeightSync(), noted, *guards, IterationCheckpoint(100)]
    trainer = trainer_of(
        where, callbacks, devices=2, strategy="ddp", logger=CSVLogger(where),
        enable_checkpointing=True,
    )  # fmt: skip
    data = RLDataModule(
        prompts(), [share_of_even_digits], TransformersEngine(), sampling=Sampling(6),
        group_size=3, groups_per_iteration=4, iterations_per_epoch=5, seed=5,
    )  # fmt: skip
    module = PolicyModule(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), update={"seed": 7})
    try:
        trainer.fit(module, data)
    except GuardError as stopped:
        weights = digests(module.policy.state_dict().items())
        return {"rows": noted.rows, "reason": stopped.reason, "weights": weights,
                "saved": Path(stopped.checkpoint or "").name}  # fmt: skip
    raise AssertionError("the guard did not stop the run")


def rerun(model: str, sharded: bool = False, *, where: Path) -> dict[str, Any]:
    """Run by the command line; by as many processes, pack an iteration, bisect and audit the run,
    and do an iteration again, also with a change.

    A ``sharded`` run, whose checkpoints are sharded too, is only packed, bisected and audited.
    """
    rank = os.environ["RANK"]
    file = where / f"prompts_{rank}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    config = where / f"config_{rank}.yaml"
    config.write_text(yaml.safe_dump(_config(model, where, file, sharded)))
    run, step = str(where / "lightning_logs" / "version_0"), str(where / "step.zip")
    page = where / "bisect.html"
    fitted = command("fit", "--config", str(config))
    packed = command("pack", run, "--iteration", "4", "--out", step)
    torch.distributed.barrier()  # until it is written
    made = {
        "run": Path(run),
        "step": Path(step),
        "fit": fitted,
        "pack": packed,
        "unpack": command("unpack", step, "--run", "--out", str(where / "unpacked")),
        "bisect": command("bisect", run, "--good", "2", "--bad", "4", "--page", str(page)),
        "audit": command("audit", run, "--share", "0.5", "--rollouts", "1", "--seed", "1"),
    }
    if sharded:
        return made
    return made | {
        "iteration": command("rerun", run, "--iteration", "4", "--since", "0"),
        "without": command("rerun", run, "--to", "4", "--without", "4/1", "--evaluate"),
        "too much": command("rerun", run, "--to", "4", "--without", "4/1", "--without", "4/3"),
    }


def command(*arguments: str, folders: Sequence[Path] = ()) -> tuple[int, str, str]:
    """Return the status of ``lightning-rl`` with these arguments, its output, and its errors.

    ``folders`` are the working directories of the ranks.
    """
    if folders:
        os.chdir(folders[int(os.environ["RANK"]) % len(folders)])
    said = io.StringIO()
    with tempfile.TemporaryFile("w+") as errors:  # processes that are started need a real one
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            status = main(list(arguments))
        errors.seek(0)
        return status, said.getvalue(), errors.read()


def _config(model: str, where: Path, prompts: Path, sharded: bool) -> dict[str, Any]:
    shards = {
        "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
        "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    return {
        "model": {"class_path": "PolicyModule", "init_args": {
            "model": model, "update": {"minibatches": 2},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
        }},
        "data": {"class_path": "RLDataModule", "init_args": {
            "train_prompts": {"class_path": "JSONLPrompts", "init_args": {"path": str(prompts)}},
            "rewards": ["tests.support.ranks_run.share_of_even_digits"],
            "engine": {"class_path": "TransformersEngine"},
            "sampling": {"max_tokens": 6}, "group_size": 3, "groups_per_iteration": 4,
            "iterations_per_epoch": 4, "evaluation": {"prompts": str(prompts)},
        }},
        "trainer": {
            "accelerator": "cpu", "devices": 2, "max_epochs": 1,
            "strategy": shards if sharded else "ddp",
            "enable_model_summary": False, "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(where)}},
            "callbacks": [
                {"class_path": "WeightSync"},
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 2}},
                {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 2}},
            ],
        },
    }  # fmt: skip
