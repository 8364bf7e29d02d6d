"""Define the tasks on which both sides of `benchmarks/peers` and `benchmarks/wall` train."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scaling import SIZES, make_model
from benchmarks.support.task import MODEL, OUT
from recipes.sort_digits.prepare import draw_sft, rl_rows, write_missing

GOAL, NEVER = 0.90, 2.0
BUILD = Path("build")
LONG_PROMPT, LONGEST = 512, 100
DIGITS, TIMES = 9, 3
"""The task `longer` has 9 digits, whose answer is written 3 times, so 28 tokens with the last."""


@dataclass(frozen=True)
class Task:
    """A task of both sides; TRL's padded batches fit into memory in parts of ``micro_batch``."""

    name: str
    model: Path
    prompts: Path
    iterations: int
    max_tokens: int = 10
    max_model_len: int = 32
    micro_batch: int = 256
    goal: float = NEVER


def quick_task(iterations: int) -> Task:
    """Define the quickstart's task, to the goal."""
    return Task("quickstart", MODEL, OUT / "train.jsonl", iterations, goal=GOAL)


def longer_task(iterations: int) -> Task:
    """Define completions of nearly the same length, so that padding costs nothing."""
    directory = BUILD / "peers-longer"
    rng = random.Random(0)
    drawn = ["".join(rng.choices("0123456789", k=DIGITS)) + "=" for _ in range(12_000)]
    rows = {
        "sft.jsonl": repeated(draw_sft(drawn[4096:]), "completion"),
        "train.jsonl": repeated(rl_rows(drawn[:4096]), "answer"),
    }
    write_missing(directory_of(directory), rows)
    trained = warm_start(longer_model(directory, MODEL), directory, steps=600)
    tokens = TIMES * DIGITS + 5
    length = DIGITS + 1 + tokens
    return Task("longer", trained, directory / "train.jsonl", iterations, tokens, length)


def heavy_task(iterations: int) -> Task:
    """Define digits by a Pareto distribution, and a model that learned such lengths."""
    directory = BUILD / "peers-heavy"
    rng = random.Random(0)
    lengths = [min(LONGEST, int(3 * rng.paretovariate(1.0))) for _ in range(12_000)]
    drawn = ["".join(rng.choices("0123456789", k=n)) + "=" for n in lengths]
    rows = {"sft.jsonl": draw_sft(drawn[4096:]), "train.jsonl": rl_rows(drawn[:4096])}
    write_missing(directory_of(directory), rows)
    trained = warm_start(longer_model(directory, MODEL), directory, steps=400)
    tokens, length = LONGEST + 10, 2 * LONGEST + 20
    return Task("heavy", trained, directory / "train.jsonl", iterations, tokens, length)


def long_task(iterations: int) -> Task:
    """Define prompts behind a random run of digits."""
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


def large_task(iterations: int) -> Task:
    """Define the quickstart's task with 27M parameters, which learned how long an answer is."""
    return sized_task("large", iterations, lr=3e-4)


def huge_task(iterations: int) -> Task:
    """Define the same with 109M parameters."""
    return sized_task("huge", iterations, lr=2e-4)


def sized_task(size: str, iterations: int, lr: float) -> Task:
    """Define the quickstart's task with another size of model, after 300 steps of imitation."""
    directory = directory_of(BUILD / f"peers-{size}")
    model = directory / "model"
    if not (model / "tokenizer_config.json").exists():
        make_model(SIZES[size], model)
    trained = warm_start(model, directory, steps=300, lr=lr, rows=OUT / "sft.jsonl")
    return Task(size, trained, OUT / "train.jsonl", iterations)


def directory_of(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def repeated(rows: Sequence[Mapping[str, str]], column: str) -> list[dict[str, str]]:
    return [{**row, column: row[column] * TIMES} for row in rows]


def longer_model(directory: Path, source: Path) -> Path:
    """Copy the model so that it may read longer texts; no weight depends on it."""
    model = directory / "model"
    shutil.copytree(source, model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return model


def warm_start(
    model: Path, directory: Path, steps: int, lr: float = 1e-3, rows: Path | None = None
) -> Path:
    """Imitate ``rows``, by default ``sft.jsonl``, for some steps; made once."""
    trained = directory / "sft" / "hf"
    if not (trained / "config.json").exists():
        command = ["fit", "--config", "recipes/sort_digits/sft.yaml", "--model.model", model]
        command += ["--data.train.init_args.path", rows or directory / "sft.jsonl"]
        command += ["--model.optimizer.init_args.lr", lr]
        command += ["--trainer.max_steps", steps]
        command += ["--model.lr_scheduler.init_args.total_steps", steps]
        command += ["--trainer.logger", "false", "--trainer.callbacks", "HFExport"]
        command += ["--trainer.callbacks.directory", trained]
        subprocess.run([sys.executable, "-m", "lightning_rl", *map(str, command)], check=True)
    return trained
