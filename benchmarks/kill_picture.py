"""Draw the quickstart's run, killed ten times, beside the run that nothing stopped; and SFT's.

    lightning-rl quickstart                  makes the model and its questions
    python -m benchmarks.kill_picture [--out docs/images/killed.png]

GRPO and SFT of the same model, each twice, as `lightning-rl fit ... --ckpt_path last` with a
checkpoint every iteration. One of the two gets a SIGKILL again and again: while it collects, in a
backward pass, between the accumulated batches of a step, and while it saves; each time the same
command is given again. The picture shows reward and loss by iteration. The last line is JSON:
`equal` is true where weights, optimizer, random states, metrics (but times) and rollouts of both
are the same to the last bit.

`--recipe sort_digits` does the same with the small model of `recipes/sort_digits`, in minutes.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.kill.compare import compare, run_directory
from benchmarks.kill.killer import Point, armed
from benchmarks.kill.runs import run_command
from benchmarks.support.colours import INK

ROOT = Path(__file__).parents[1]
MODELS = {"smollm2": "runs/smollm2/model", "sort_digits": "runs/sort_digits/sft/hf"}
MADE_BY = {"smollm2": "lightning-rl quickstart",
           "sort_digits": "python -m recipes.sort_digits.quickstart"}  # fmt: skip
COLLECTING_S = 0.3
"""The time of which a share passes before the SIGKILL: an iteration collects for longer."""
COLOURS = ("#174a7e", "#d9822b", "#3a9474", "#b03a5b")
ROWS = 96
"""Rows that SFT learns from: two epochs of 8 rows a step are 24 steps."""


@dataclass
class Run:
    """A run, and what is drawn of it."""

    name: str
    config: dict[str, Any]
    metric: str
    label: str
    stages: Sequence[str]
    iterations: int

    def points(self, kills: int) -> list[Point]:
        """Return the points of the kills: each stage in turn, spread over the iterations."""
        places = [1 + number * (self.iterations - 1) // kills for number in range(kills)]
        stages = [self.stages[number % len(self.stages)] for number in range(kills)]
        return [Point(stage, place, 0.5) for stage, place in zip(stages, places, strict=True)]

    def configured(self, out: Path) -> dict[str, Any]:
        """Return the configuration, with a checkpoint every iteration and its logs in ``out``."""
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        every = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}}
        config["trainer"]["callbacks"].append(every)
        place = {"save_dir": str(out), "name": "run"}
        config["trainer"]["logger"] = {"class_path": "TensorBoardLogger", "init_args": place}
        return config

    def values(self, out: Path) -> list[float]:
        """Return the metric of every iteration so far; an evaluation before the first has none."""
        lines = (run_directory(out) / "metrics.jsonl").read_text().splitlines()
        rows = {row["iteration"]: row for row in map(json.loads, lines) if self.metric in row}
        return [row[self.metric] for _, row in sorted(rows.items())]

    def to_the_end(self, out: Path) -> None:
        status = run_command(self.configured(out), out)
        if status != 0:
            raise SystemExit(f"{self.name} ended with {status}: {out}/output.txt")

    def killed(self, out: Path, kills: int) -> list[int]:
        """Run it through all kills; how many iterations were done when each process ended."""
        ends = []
        for point in self.points(kills):
            status = run_command(armed(self.configured(out), point, COLLECTING_S), out)
            if status != -signal.SIGKILL:
                raise SystemExit(f"to be killed at {point}, it ended with {status}: {out}")
            ends.append(len(self.values(out)))
            print(f"{self.name}: killed at {point.stage}, after {ends[-1]}", flush=True)
        self.to_the_end(out)
        return [*ends, len(self.values(out))]


def grpo(recipe: str) -> Run:
    """Return the recipe's own run."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / recipe / "grpo.yaml").read_text())
    unseen = ("RLProgressBar", "HFExport", "IterationCheckpoint")
    trainer = config["trainer"]
    kept = [c for c in trainer["callbacks"] if c["class_path"] not in unseen]
    trainer |= {"enable_progress_bar": False, "callbacks": kept}
    per_epoch = config["data"]["init_args"]["iterations_per_epoch"]
    stages = ("collect", "backward", "save")
    iterations = per_epoch * trainer["max_epochs"]
    return Run("GRPO", config, "reward/mean", "mean reward", stages, iterations)


def sft(recipe: str, rows: Path) -> Run:
    """Return SFT of the same model on answers to the recipe's questions."""
    lines = (ROOT / "runs" / recipe / "train.jsonl").read_text().splitlines()[:ROWS]
    asked = map(json.loads, lines)
    answered = [
        {"prompt": row["prompt"], "completion": str(row.get("answer", row.get("solution")))}
        for row in asked
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in answered))
    read = {"class_path": "JSONLPrompts", "init_args": {"path": str(rows)}}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-5}}
    config = {
        "seed_everything": 0,
        "model": {"class_path": "SFTModule",
                  "init_args": {"model": MODELS[recipe], "optimizer": optimizer}},
        "data": {"class_path": "SFTDataModule", "init_args": {"train": read, "batch_size": 4}},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2,
            "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [],
        },
    }  # fmt: skip
    stages = ("backward", "within_a_step", "save")
    return Run("SFT", config, "sft/loss", "loss", stages, 2 * len(answered) // 8)


def draw(runs: Sequence[tuple[Run, list[float], list[float], list[int]]], path: Path) -> None:
    """Draw uninterrupted runs as lines, killed ones as dots, in a new colour after each kill."""
    figure = Figure(figsize=(9, 3.4 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, (run, whole, resumed, ends) in zip(panels, runs, strict=True):
        iterations = range(1, len(whole) + 1)
        axes.plot(iterations, whole, color="#c3ccd5", linewidth=7, label="never stopped")
        begin = 0
        for number, end in enumerate(ends):
            style = {"color": COLOURS[number % len(COLOURS)]}
            axes.plot(iterations[begin:end], resumed[begin:end], "o", **style)
            begin = end
        for number, end in enumerate(ends[:-1]):
            label = "kill -9" if number == 0 else None
            axes.axvline(end + 0.5, color=INK, linewidth=1, linestyle=":", label=label)
        axes.set_ylabel(run.label, color=INK)
        axes.set_title(f"{run.name}, killed {len(ends) - 1} times: the same run, bit for bit",
                       loc="left", fontsize=12, fontweight="bold", color=INK)  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
        axes.legend(frameon=False)
    panels[-1].set_xlabel("iteration", color=INK)
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw runs that were killed again and again.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "killed.png")
    parser.add_argument("--recipe", choices=list(MODELS), default="smollm2")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", choices=["grpo", "sft"], help="one of the two runs")
    given = parser.parse_args(arguments)
    if not (ROOT / MODELS[given.recipe]).is_dir():
        made = MADE_BY[given.recipe]
        raise SystemExit(f"there is no model in {MODELS[given.recipe]}; make it by `{made}`")
    drawn: list[tuple[Run, list[float], list[float], list[int]]] = []
    found: list[str] = []
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="killed_") as folder:
        both = {"grpo": lambda: grpo(given.recipe),
                "sft": lambda: sft(given.recipe, Path(folder, "rows.jsonl"))}  # fmt: skip
        for name in [given.only] if given.only else both:
            run, whole, killed = both[name](), Path(folder, name), Path(folder, f"{name}_killed")
            run.to_the_end(whole)
            ends = run.killed(killed, given.kills)
            found += compare(killed, whole, iterations=ends[-1])
            drawn.append((run, run.values(whole), run.values(killed), ends))
            result[f"{name}_iterations"] = ends[-1]
        if not found:
            draw(drawn, given.out)
    result |= {"kills": given.kills * len(drawn), "equal": not found, "differences": found}
    print(json.dumps(result))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
