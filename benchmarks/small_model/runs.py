"""Run trainings and exams, each in a process of its own, and only where its result is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.layouts import PEER_PYTHON, make_environment

DATA, OUT = Path("runs/smollm2"), Path("runs/small_model")
RECIPE = "recipes/smollm2"
TRAINED = ("products", "largest", "letters", "sums", "stories")
GROUPS, GROUP_SIZE, MAX_TOKENS = 10, 8, 32
ITERATIONS, SHORT = 40, 20
LR, LORA_LR = 2e-5, 2e-4
SEEDS = (0, 1, 2)
FULL: dict[str, dict[str, Any]] = {f"full-{seed}": {"lr": LR, "seed": seed} for seed in SEEDS}
LORA: dict[str, dict[str, Any]] = {"lora-0": {"lr": LORA_LR, "lora": True}}
SWEEP: dict[str, dict[str, Any]] = {
    **{f"full-{lr:.0e}": {"lr": lr, "iterations": SHORT} for lr in (1e-5, 4e-5, 8e-5)},
    **{f"lora-{lr:.0e}": {"lr": lr, "iterations": SHORT, "lora": True} for lr in (4e-4, 8e-4)},
}
RUNS = FULL | LORA | SWEEP
EXAMS: dict[str, dict[str, object]] = {
    "untrained": {},
    "untrained-long": {"--max-tokens": 256, "--temperature": 0},
}
"""Exams of the untrained model: as in training, and greedily with eight times as many tokens."""
TRL = "trl"
PACKAGES = "lib/python3*/site-packages"

Option = tuple[str, object]


def trained(
    name: str,
    lr: float,
    seed: int = 0,
    lora: bool = False,
    iterations: int = ITERATIONS,
    teacher: str | None = None,
    precision: str = "32-true",
) -> Path:
    """Return the run directory of a configuration, trained if it is not there yet.

    ``teacher`` is the run whose model is the teacher; None: the model learns from rewards.
    ``precision`` is the trainer's.
    """
    directory = OUT / name / "version_0"
    if not (directory / "hf" / "config.json").exists():
        files = ["grpo.yaml", "variants/five.yaml", *(["variants/lora.yaml"] if lora else [])]
        taught: list[Option] = []
        if teacher is not None:
            files.append("variants/teacher.yaml")
            taught = [taught_by(OUT / teacher / "version_0" / "hf")]
        # Accuracy is told by the exams, and by the reward of each iteration.
        export = {"class_path": "HFExport", "init_args": {"merge_adapters": lora}}
        options: list[Option] = [
            *configs(files),
            ("--seed_everything", seed),
            ("--model.optimizer.init_args.lr", lr),
            ("--data.iterations_per_epoch", iterations),
            ("--trainer.precision", precision),
            ("--trainer.logger.save_dir", OUT),
            ("--trainer.logger.name", name),
            ("--trainer.callbacks", json.dumps([{"class_path": "RunReport"}, export])),
            *taught,
            *([("--ckpt_path", "last")] if directory.exists() else []),  # it was stopped
        ]
        run([sys.executable, "-m", "lightning_rl", "fit"], options)
    return directory


def configs(files: Iterable[str]) -> list[Option]:
    """Return the options that merge these files of the recipe."""
    return [("--config", f"{RECIPE}/{file}") for file in files]


def taught_by(model: Path) -> Option:
    """Return the option that adds a model as the teacher, with its 16 likeliest tokens."""
    arguments = {"model": str(model), "top_k": 16}
    teacher = {"class_path": "lightning_rl.ModelTeacher", "init_args": arguments}
    return "--data.rewards", json.dumps(["recipes.smollm2.tasks.last_number", teacher])


def trained_by_trl() -> Path:
    """Return the directory of TRL's run."""
    directory = OUT / TRL
    if not (directory / "measured_0.json").exists():
        make_environment()
        options = {"data": DATA, "out": directory, "lr": LR, "iterations": ITERATIONS}
        environment = os.environ | {
            "TRL_PACKAGES": ":".join(map(str, PEER_PYTHON.parents[1].glob(PACKAGES))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": "",
        }
        command = [sys.executable, "-m", "benchmarks.small_model.trl"]
        run(command, [(f"--{name}", value) for name, value in options.items()], environment)
    return directory


def run(
    command: list[str],
    options: Iterable[Option],
    environment: dict[str, str] | None = None,
) -> None:
    words = [str(word) for option in options for word in option]
    subprocess.run([*command, *words], check=True, env=environment)


def examined(name: str, model: Path) -> dict[str, Any]:
    """Return the result of a model's exam, which is held if it was not yet."""
    path = OUT / "exams" / f"{name}.json"
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.exam", str(model), "--out", str(path)]
        run(command, EXAMS.get(name, {}).items())
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def measured(name: str) -> dict[str, Any]:
    """Return the exam of a model, and the rewards and CPU seconds of its training by iteration.

    The untrained model has the first alone, and what was trained for a learning rate the second.
    """
    if name in EXAMS:
        return examined(name, DATA / "model")
    if name == TRL:
        directory = trained_by_trl()
        progress = json.loads((directory / "measured_0.json").read_text(encoding="utf-8"))
        found = {"rewards": progress["rewards"], "cpu_s": progress["cpu_s"]}
    else:
        directory = trained(name, **RUNS[name])
        found = rewards_and_seconds(directory)
    return found if name in SWEEP else found | examined(name, directory / "hf")


def rewards_and_seconds(directory: Path) -> dict[str, Any]:
    """Return the mean reward and the CPU seconds of each iteration of a run."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = [after["cpu_s"] - before["cpu_s"] for before, after in pairwise(rows)]
    return {"rewards": rewards, "cpu_s": seconds}
