"""What does a second process gain at the same batch, and what do four?

    python -m benchmarks.scaling [--sizes tiny small large huge] [--processes 1 2 4] [--save]

The same GRPO, once on one process and once on two (DDP over gloo, an engine in each, one thread
each), or on as many as ``--processes`` names, in turns. Completions are cut at a fixed length, and
all train on the very same rollouts, which is checked. An iteration has wall seconds and their
parts, CPU seconds of all processes, and generated tokens per wall second. The last line is JSON.
``--save`` also writes the table and the figure of docs/distributed.md. Only a quiet machine with a
core per process can show a gain: four processes on two cores cannot be faster than two, and show
what the further two cost.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.task import Rows, quiet_trainer
from lightning_rl import (
    IterablePrompts,
    PolicyModule,
    RLDataModule,
    Sampling,
    StepTimer,
    UpdateSettings,
    VLLMLocal,
    WeightSync,
)
from recipes.sort_digits.prepare import make_tokenizer

DOCS = Path(__file__).parents[1] / "docs"
PARTS = ("generate", "logprob", "train", "sync")
COLORS = ("#2f6fb0", "#93b5d6", "#d9822b", "#3a9474", "#d9dee4")


@dataclass(frozen=True)
class Size:
    """A model's width and layers, and a batch."""

    hidden: int
    layers: int
    groups: int
    group_size: int
    tokens: int


SIZES = {
    "tiny": Size(hidden=64, layers=2, groups=4, group_size=2, tokens=4),
    "small": Size(hidden=192, layers=4, groups=32, group_size=8, tokens=10),
    "large": Size(hidden=512, layers=8, groups=32, group_size=8, tokens=24),
    "huge": Size(hidden=1024, layers=8, groups=32, group_size=8, tokens=24),
}


# ---------------------------------------------------------------- one run, in processes of its own


def make_model(size: Size, path: Path) -> int:
    """Make a random Qwen2 over digits; return its number of parameters."""
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return int(model.num_parameters())


def share_of_even_digits(completions: list[str], **columns: Any) -> list[float]:
    """Differs within a group, so that every rollout is trained on."""
    return [sum(digit in "02468" for digit in text) / max(1, len(text)) for text in completions]


class Stopwatch(Rows):
    """Writes what each iteration took in this process."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = Path(directory)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        if "time/iteration" not in metrics:  # before training
            return
        row = {part: metrics[f"time/{part}"] for part in PARTS}
        row |= {"wall": time.perf_counter(), "cpu": time.process_time()}
        row["tokens"] = sum(len(rollout.token_ids) for rollout in self.rollouts)
        self.rows.append(row | {"reward": metrics["reward/mean"]})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        file = self.directory / f"rank_{trainer.global_rank}.json"
        file.write_text(json.dumps(self.rows))


def train(size: Size, model: str, processes: int, iterations: int, directory: str) -> None:
    """Run by every process."""
    data = RLDataModule(
        IterablePrompts([{"prompt": f"{number}="} for number in range(100, 1000)], seed=0),
        [share_of_even_digits],
        VLLMLocal(max_model_len=64, kv_cache_gb=0.1),
        sampling=Sampling(max_tokens=size.tokens, min_tokens=size.tokens),
        groups_per_iteration=size.groups,
        group_size=size.group_size,
        iterations_per_epoch=iterations,
        seed=0,
    )
    trainer = quiet_trainer(
        directory,
        [WeightSync(), StepTimer(), Stopwatch(directory)],
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
    )
    trainer.fit(PolicyModule(model, update=UpdateSettings(seed=0)), datamodule=data)


# ---------------------------------------------------------------- all runs


def measure(
    name: str, model: Path, processes: int, iterations: int, warmup: int
) -> dict[str, float]:
    """Measure means over the iterations after ``warmup``; wall times are rank 0's alone."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.scaling", "--worker", directory]
        command += ["--sizes", name, "--model", str(model), "--processes", str(processes)]
        command += ["--iterations", str(iterations), "--warmup", str(warmup)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        files = sorted(Path(directory).glob("rank_*.json"))
        ranks = [json.loads(file.read_text()) for file in files]
    assert len(ranks) == processes
    first = ranks[0]
    wall = (first[-1]["wall"] - first[warmup - 1]["wall"]) / iterations
    tokens = statistics.mean(
        sum(rows[i]["tokens"] for rows in ranks) for i in range(warmup, len(first))
    )
    parts = {part: statistics.mean(row[part] for row in first[warmup:]) for part in PARTS}
    return parts | {
        "wall_s": wall,
        "cpu_s": sum(rows[-1]["cpu"] - rows[warmup - 1]["cpu"] for rows in ranks) / iterations,
        "tokens_per_s": tokens / wall,
        "tokens": tokens,
        "first_reward": first[0]["reward"],
    }


def compare(
    name: str, processes_of: Sequence[int], iterations: int, warmup: int, repeats: int
) -> dict[str, Any]:
    """Compare medians over ``repeats`` of these numbers of processes in turns."""
    runs: dict[int, list[dict[str, float]]] = {processes: [] for processes in processes_of}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        parameters = make_model(SIZES[name], model)
        for _ in range(repeats):
            for processes, done in runs.items():
                done.append(measure(name, model, processes, iterations, warmup))
    # All collected the same rollouts; later the weights differ by rounding.
    rewards = {round(run["first_reward"], 9) for done in runs.values() for run in done}
    if len(rewards) > 1:
        raise RuntimeError(f"{list(runs)} processes collected other rollouts: {rewards}")
    result: dict[str, Any] = {"parameters": parameters}
    for processes, done in runs.items():
        result[str(processes)] = {
            key: statistics.median(run[key] for run in done)
            for key in (*PARTS, "wall_s", "cpu_s", "tokens_per_s", "tokens")
        }
    first, last = (result[str(count)]["wall_s"] for count in (processes_of[0], processes_of[-1]))
    result["speedup"] = first / last
    return result


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the measurements by the number of processes."""
    return {key: row for key, row in result.items() if key.isdigit()}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| parameters | tokens a batch | processes | s per iteration | of it generating, training "
        "| CPU s, all processes | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results.values():
        rows = rows_of(result)
        first = next(iter(rows.values()))
        for processes, row in rows.items():
            speedup = first["wall_s"] / row["wall_s"]
            gain = "" if row is first else f" ({speedup:.2f}× as fast)"
            lines.append(
                f"| {result['parameters'] / 1e6:.1f} M | {row['tokens']:.0f} | {processes} "
                f"| {row['wall_s']:.2f}{gain} | {row['generate']:.2f}, {row['train']:.2f} "
                f"| {row['cpu_s']:.2f} | {row['tokens_per_s']:,.0f} |"
            )
    return lines


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw seconds per iteration and their parts, by the number of processes."""
    figure = Figure(figsize=(2.6 * len(results) + 1.6, 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results.values(), strict=True):
        rows = list(rows_of(result).values())
        names = [f"{count} process" if count == "1" else count for count in rows_of(result)]
        bottom = [0.0] * len(rows)
        rest = [row["wall_s"] - sum(row[part] for part in PARTS) for row in rows]
        heights = [[row[part] for row in rows] for part in PARTS] + [rest]
        for part, color, height in zip((*PARTS, "other"), COLORS, heights, strict=True):
            panel.bar(names, height, 0.6, bottom, label=part, color=color)
            bottom = [low + high for low, high in zip(bottom, height, strict=True)]
        panel.set_title(
            f"{result['parameters'] / 1e6:.1f} M parameters: {result['speedup']:.2f}×", fontsize=10
        )
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds per iteration")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    parser.add_argument("--iterations", type=int, default=12, help="counted ones")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before them, at least 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="draw it here")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of them")
    for internal in ("--worker", "--model"):
        parser.add_argument(internal, help=SUPPRESS)
    arguments = parser.parse_args()
    counted, warmup = arguments.iterations, max(1, arguments.warmup)
    if arguments.worker:
        size, processes = SIZES[arguments.sizes[0]], arguments.processes[0]
        train(size, arguments.model, processes, counted + warmup, arguments.worker)
        return
    load = os.getloadavg()[0]
    results = {
        name: compare(name, arguments.processes, counted, warmup, arguments.repeats)
        for name in arguments.sizes
    }
    lines = table(results)
    print("\n".join(lines))
    if arguments.figure or arguments.save:
        draw(results, arguments.figure or DOCS / "images" / "scaling.png")
    if arguments.save:
        figure = "![Seconds per iteration by processes](images/scaling.png)"
        write_block(DOCS / "distributed.md", "scaling", [*lines, "", figure])
    report("scaling", {"load_before": load, **results}, arguments.save)


if __name__ == "__main__":
    main()
