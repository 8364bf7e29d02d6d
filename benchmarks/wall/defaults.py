"""Run both sides for `benchmarks.wall --defaults`, as they are where nothing is chosen.

Ours is the command `fit` with a configuration that names neither engine nor processes, in an
environment that names no threads. TRL's is `GRPOTrainer` in one process that pads, with the threads
that torch takes by itself.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from benchmarks.peers.layouts import Layout, counted, run_trl
from benchmarks.peers.tasks import NEVER, Task
from lightning_rl.run.processes.machine import usable_cores

CONFIG = Path("recipes/sort_digits/grpo.yaml")


def configuration(task: Task, folder: Path) -> Path:
    """Write the recipe's configuration for the task, with TRL's one update, for any machine."""
    config = yaml.safe_load(CONFIG.read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    del data["engine"], data["evaluation"], config["trainer"]["devices"]
    model |= {"model": str(task.model), "update": {"minibatches": 1}}
    model["optimizer"]["init_args"]["lr"] = 1e-4
    data["train_prompts"]["init_args"]["path"] = str(task.prompts)
    data["sampling"]["max_tokens"] = task.max_tokens
    data["iterations_per_epoch"] = task.iterations
    config["trainer"] |= {
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}},
        "callbacks": ["PreviewTable", "StepTimer", "RunReport"],
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run_ours(
    task: Task, options: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return wall seconds of each iteration, and of the whole command."""
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    environment.pop("OMP_NUM_THREADS", None)
    environment |= variables or {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config"]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, str(configuration(task, folder)), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        whole = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"fit failed: {done.stderr[-3000:]}")
        [metrics] = folder.rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    iterations = [row["time/iteration"] for row in rows if "time/iteration" in row]
    return {"wall_s": iterations, "whole_s": whole}


def run_theirs(task: Task, seed: int) -> dict[str, Any]:
    """Return the same of TRL."""
    layout = Layout(threads=usable_cores(), generation="padded")
    begin = time.perf_counter()
    return {**run_trl(task, seed, layout), "whole_s": time.perf_counter() - begin}


def compare(tasks: list[Task], runs: int) -> dict[str, Any]:
    """Compare both in turns."""
    found: dict[str, Any] = {}
    for task in (replace(task, goal=NEVER) for task in tasks):
        sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for turn in range(runs):
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                last = run_ours(task) if side == "ours" else run_theirs(task, turn)
                sides[side].append(last)
                each = statistics.median(counted([last], "wall_s"))
                told = f"{each:.3f} s per iteration, {last['whole_s']:.1f} s in all"
                print(f"{task.name:<11}{side:<5}{told}", flush=True)
        found[task.name] = {side: summary(done) for side, done in sides.items()}
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "wall_s_per_iteration": statistics.median(counted(runs, "wall_s")),
        "whole_s": [run["whole_s"] for run in runs],
    }


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """Return TRL / ours, of an iteration and of whole commands."""
    each = "wall_s_per_iteration"
    result = {f"default_ratio_{t}": r["trl"][each] / r["ours"][each] for t, r in found.items()}
    for name, sides in found.items():
        whole = {side: statistics.median(row["whole_s"]) for side, row in sides.items()}
        result[f"default_whole_ratio_{name}"] = whole["trl"] / whole["ours"]
    return result
