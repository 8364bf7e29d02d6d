"""What does an iteration, and reaching 0.90, cost with this library and with TRL's GRPOTrainer?

    python -m benchmarks.peers [--threads 1 2] [--save]

The quickstart's warm-started model, its prompts, 32 x 8 completions, learning rate 1e-4,
temperature 1, no KL, one update per iteration, float32. TRL 1.16.0 lives in an environment of its
own, `build/peers-venv`, which the first run makes (set PIP_FIND_LINKS to where a CPU wheel of torch
lies). It generates with transformers, padded or with continuous batching, or with vLLM, colocated
and synced by a shim (benchmarks/peers_trl_vllm.py): the fastest on each task is compared. Its other
settings are the best we know (benchmarks/peers_trl.py).

Runs alternate, each in a process of its own; seconds are of the training loop, without imports and
start-up (`setup_cpu_s`). Tasks: `quickstart`, completions of at most 10 tokens, until the mean
sampled reward of three iterations is 0.90; `heavy`, a few iterations of the same with lengths from
a Pareto distribution, up to 100 digits; `long`, a few with prompts of 512 tokens (random digits
before the task). The last line is JSON, of the first number of threads, with the others under their
number. All ratios are TRL / ours: `cpu_ratio` of CPU seconds to 0.90, `iteration_ratio` of the
median iteration, `heavy_ratio` and `long_prompt_ratio` the same on these tasks; `wall_ratio` is of
wall seconds per iteration on the quickstart task, which tells something on an idle machine only.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import parser_of, report
from benchmarks.task import MODEL, OUT, prepare
from recipes.sort_digits.prepare import draw_sft, rl_rows, write_missing

GOAL, NEVER = 0.90, 2.0
BUILD = Path("build")
PEER_PYTHON = BUILD / "peers-venv" / "bin" / "python"
GENERATIONS: dict[str, list[object]] = {
    "padded": [PEER_PYTHON, "-m", "benchmarks.peers_trl"],
    "continuous": [PEER_PYTHON, "-m", "benchmarks.peers_trl"],
    "vllm": [sys.executable, "-m", "benchmarks.peers_trl_vllm"],
}
"""Commands with which TRL generates."""
PEER_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
LONG_PROMPT, LONGEST = 512, 100
START_S = 30
"""That vLLM may take to start, at most."""


@dataclass(frozen=True)
class Task:
    """What both train on; ``micro_batch`` is what of TRL's padded batch fits into memory."""

    name: str
    model: Path
    prompts: Path
    iterations: int
    max_tokens: int = 10
    max_model_len: int = 32
    micro_batch: int = 256
    goal: float = NEVER


def make_environment() -> None:
    """TRL's environment, if it is not there yet."""
    if PEER_PYTHON.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", PEER_PYTHON.parents[1]], check=True)
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    subprocess.run(pip, check=True)


def longer_model(directory: Path, source: Path) -> Path:
    """A copy of the model that may read longer texts; no weight depends on it."""
    model = directory / "model"
    shutil.copytree(source, model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return model


def long_task(iterations: int) -> Task:
    """Prompts behind a random run of digits."""
    directory = BUILD / "peers-long"
    model = longer_model(directory, MODEL)
    rng = random.Random(0)

    def behind_digits(row: dict[str, str]) -> dict[str, str]:
        digits = "".join(rng.choices("0123456789", k=LONG_PROMPT - 1 - len(row["prompt"])))
        return row | {"prompt": f"{digits}={row['prompt']}"}

    with (OUT / "train.jsonl").open() as file:
        rows = [behind_digits(json.loads(next(file))) for _ in range(1024)]
    write_missing(directory, {"train.jsonl": rows})
    prompts, length = directory / "train.jsonl", LONG_PROMPT + 16
    return Task("long", model, prompts, iterations, max_model_len=length, micro_batch=8)


def heavy_task(iterations: int) -> Task:
    """Numbers of digits from a Pareto distribution, and a model that learned such lengths."""
    directory = BUILD / "peers-heavy"
    model, trained = longer_model(directory, MODEL), directory / "sft" / "hf"
    rng = random.Random(0)
    lengths = [min(LONGEST, int(3 * rng.paretovariate(1.0))) for _ in range(12_000)]
    drawn = ["".join(rng.choices("0123456789", k=n)) + "=" for n in lengths]
    rows = {"sft.jsonl": draw_sft(drawn[4096:]), "train.jsonl": rl_rows(drawn[:4096])}
    write_missing(directory, rows)
    if not trained.exists():
        command = ["fit", "--config", "recipes/sort_digits/sft.yaml", "--model.model", model]
        command += ["--data.train.init_args.path", directory / "sft.jsonl"]
        command += ["--trainer.max_steps", 400, "--model.lr_scheduler.init_args.total_steps", 400]
        command += ["--trainer.logger", "false", "--trainer.callbacks", "HFExport"]
        command += ["--trainer.callbacks.directory", trained]
        subprocess.run([sys.executable, "-m", "lightning_rl", *map(str, command)], check=True)
    tokens, length = LONGEST + 10, 2 * LONGEST + 20
    return Task("heavy", trained, directory / "train.jsonl", iterations, tokens, length)


def run(
    command: Sequence[object], task: Task, seed: int, threads: int, patience: float | None = None
) -> dict[str, Any]:
    """One training run; returns what its last line says.

    Raises:
        RuntimeError: if it fails.
        subprocess.TimeoutExpired: if it is not over after ``patience`` seconds.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": str(threads),
        "TRL_PACKAGES": str(next(PEER_PYTHON.parents[1].glob("lib/python3*/site-packages"))),
    }
    options = {
        "model": task.model,
        "prompts": task.prompts,
        "iterations": task.iterations,
        "max-tokens": task.max_tokens,
        "max-model-len": task.max_model_len,
        "micro-batch": task.micro_batch,
        "goal": task.goal,
        "seed": seed,
        "threads": threads,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as log:
        result = subprocess.run(
            [str(word) for word in (*command, *words, "--out", directory)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            timeout=patience,
            check=False,
        )
        if result.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[1:3]} failed:\n{log.read()[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def run_ours(task: Task, seed: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers_ours", "--generation", "vllm"]
    return run(command, task, seed, threads)


def run_trl(
    task: Task, seed: int, threads: int, generation: str, patience: float | None = None
) -> dict[str, Any]:
    command = [*GENERATIONS[generation], "--generation", generation]
    return run(command, task, seed, threads, patience)


def counted(runs: list[dict[str, Any]], key: str) -> list[float]:
    """Of every iteration but a run's first, which warms up."""
    return [value for run in runs for value in run[key][1:]]


def summary(runs: list[dict[str, Any]], task: Task) -> dict[str, float]:
    """What one side needed on one task; medians over the runs. ``reached`` of them met the goal."""
    rewards = [sum(run["rewards"][-3:]) / 3 for run in runs]
    return {
        "cpu_s_per_iteration": statistics.median(counted(runs, "cpu_s")),
        "wall_s_per_iteration": statistics.median(counted(runs, "wall_s")),
        "tokens_per_iteration": statistics.median(n for run in runs for n in run["tokens"]),
        "tokens_per_wall_s": sum(counted(runs, "tokens")) / sum(counted(runs, "wall_s")),
        "iterations": statistics.median(len(run["cpu_s"]) for run in runs),
        "cpu_s": statistics.median(sum(run["cpu_s"]) for run in runs),
        "wall_s": statistics.median(sum(run["wall_s"]) for run in runs),
        "reached": sum(reward >= task.goal for reward in rewards),
        "setup_cpu_s": statistics.median(run["setup_cpu_s"] for run in runs),
        "peak_rss_gib": max(run["peak_rss_bytes"] for run in runs) / 2**30,
    }


def measure(task: Task, seeds: list[int], threads: int) -> dict[str, Any]:
    """Both sides, alternating; the order changes with every seed."""
    generation, trials = fastest_generation(task, threads)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    sides = {
        "ours": lambda seed: run_ours(task, seed, threads),
        "trl": lambda seed: run_trl(task, seed, threads, generation),
    }
    for place, seed in enumerate(seeds):
        for name in list(sides)[:: 1 if place % 2 else -1]:
            last = sides[name](seed)
            runs[name].append(last)
            each = statistics.median(counted([last], "cpu_s"))
            print(
                f"{task.name:<11}{name:<5} seed {seed}: {len(last['cpu_s'])} iterations, "
                f"{sum(last['cpu_s']):.1f} CPU s, {each:.3f} each, "
                f"last reward {last['rewards'][-1]:.2f}",
                flush=True,
            )
    generations = {"trl_generation": generation, "trl_generation_cpu_s": trials}
    return {name: summary(done, task) for name, done in runs.items()} | generations


def fastest_generation(task: Task, threads: int) -> tuple[str, dict[str, float | None]]:
    """TRL's fastest way to generate on this task, and CPU seconds per iteration of each.

    One that takes twice as long as padding did is given up, and has None.
    """
    trial = replace(task, iterations=min(4, task.iterations), goal=NEVER)
    tried: dict[str, float | None] = {}
    patience: float | None = None
    for generation in GENERATIONS:
        begin = time.perf_counter()
        try:
            done = run_trl(trial, 0, threads, generation, patience)
            tried[generation] = statistics.median(counted([done], "cpu_s"))
        except subprocess.TimeoutExpired:
            tried[generation] = None
        patience = patience or 2 * (time.perf_counter() - begin) + START_S
    told = (f"{name} {'given up' if s is None else f'{s:.3f}'}" for name, s in tried.items())
    print(f"{task.name:<11}trl   CPU s/iteration by generation: {', '.join(told)}", flush=True)
    return min((s, name) for name, s in tried.items() if s is not None)[1], tried


def print_table(results: dict[str, Any]) -> None:
    columns = {
        "cpu_s_per_iteration": "CPU s/iter",
        "wall_s_per_iteration": "wall s/iter",
        "tokens_per_wall_s": "tokens/s",
        "iterations": "iterations",
        "cpu_s": "CPU s",
        "wall_s": "wall s",
        "setup_cpu_s": "set-up",
        "peak_rss_gib": "RSS GiB",
    }
    print(f"\n{'':17}" + "".join(f"{title:>12}" for title in columns.values()))
    for task, sides in results.items():
        for name in ("ours", "trl"):
            row = "".join(f"{sides[name][key]:12.4g}" for key in columns)
            print(f"{task:<11}{name:<6}{row}")


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """TRL / ours."""

    def ratio(task: str, key: str) -> float:
        return float(results[task]["trl"][key] / results[task]["ours"][key])

    return {
        "cpu_ratio": ratio("quickstart", "cpu_s"),
        "iteration_ratio": ratio("quickstart", "cpu_s_per_iteration"),
        "wall_ratio": ratio("quickstart", "wall_s_per_iteration"),
        "heavy_ratio": ratio("heavy", "cpu_s_per_iteration"),
        "long_prompt_ratio": ratio("long", "cpu_s_per_iteration"),
        "iterations_to_goal_ratio": ratio("quickstart", "iterations"),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-iterations", type=int, default=40)
    parser.add_argument("--few", type=int, default=3, help="iterations of heavy and long")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    prepare()
    make_environment()
    quick = Task("quickstart", MODEL, OUT / "train.jsonl", arguments.max_iterations, goal=GOAL)
    few = [heavy_task(arguments.few), long_task(arguments.few)]
    by_threads: dict[str, Any] = {}
    for threads in arguments.threads:
        print(f"\n{threads} thread(s)")
        results = {"quickstart": measure(quick, arguments.seeds, threads)}
        results |= {task.name: measure(task, arguments.seeds[:1], threads) for task in few}
        print_table(results)
        by_threads[str(threads)] = ratios(results) | results
        (_, first), *others = by_threads.items()
        # Each time, for the next one takes as long again.
        result = first | {"seeds": arguments.seeds, "threads": dict(others)}
        report("peers", result, arguments.save)


if __name__ == "__main__":
    main()
