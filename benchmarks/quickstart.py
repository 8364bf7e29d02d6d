"""Measure the quickstart: the accuracy of SmolLM2-135M-Instruct by iteration, for some seeds.

    python -m benchmarks.quickstart [--seeds 0 1 2] [--save]

Runs `lightning-rl quickstart` once per seed, unless the seed's run is complete already
(runs/quickstart/<seed>; delete it to measure again). The last line is JSON: held-out accuracy
before and after, the mean over seeds, the lowest gain of a seed, and seconds of the first seed's
GRPO.
``--save`` also keeps it in benchmarks/results, and writes the figure and the tables of the README
and of docs/quickstart.md and docs/small-model.md.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.support.colours import INK
from benchmarks.support.results import machine, parser_of, report, write_block
from benchmarks.support.seed_curves import SEEDS
from recipes.smollm2.weights import fetch

ROOT = Path(__file__).parents[1]
OUT = Path("runs/quickstart")
MODEL = Path("runs/smollm2/model")
PICTURE = ROOT / "docs" / "images" / "quickstart.png"
SHOWN = {
    "reward": lambda row: f"{row['reward/mean']:.2f}",
    "held-out accuracy": lambda row: (
        f"{row['eval/accuracy']:.3f}" if "eval/accuracy" in row else ""
    ),
    "tokens per answer": lambda row: f"{row['rollout/tokens_mean']:.0f}",
    "cut off": lambda row: f"{row['rollout/truncated_share']:.0%}",
    "groups all right or all wrong": lambda row: f"{row['reward/zero_spread_share']:.0%}",
    "entropy": lambda row: f"{row['policy/entropy']:.2f}",
    "gradient norm": lambda row: f"{row['policy/grad_norm']:.1f}",
    "gap to the engine": lambda row: f"{row['rollout/logprob_gap_mean']:.0e}",
}
"""Columns of the table of iterations."""
ITERATIONS = (1, 2, 4, 6, 8, 10, 12, 14, 16)

Row = dict[str, float]


def measured(seed: int) -> tuple[dict[str, Any], dict[int, Row]]:
    """Return the summary of a seed's run, and its metrics by iteration."""
    out = OUT / str(seed)
    run = out / "grpo" / "version_0"
    if not (run / "summary.json").exists():
        options = {"--model": fetch(MODEL), "--out": out, "--seed": seed}
        given = [str(word) for option in options.items() for word in option]
        subprocess.run([sys.executable, "-m", "lightning_rl", "quickstart", *given], check=True)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows: dict[int, Row] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(row)
    return summary, rows


def draw(curves: dict[int, dict[int, Row]]) -> None:
    """Draw held-out accuracy and mean reward by iteration; a line per seed."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (seed, rows), color in zip(curves.items(), SEEDS, strict=False):
        held_out = {i: row["eval/accuracy"] for i, row in rows.items() if "eval/accuracy" in row}
        label = f"held-out accuracy, seed {seed}"
        axes.plot(list(held_out), list(held_out.values()), "o-", color=color, label=label)
        rewards = {i: row["reward/mean"] for i, row in rows.items() if "reward/mean" in row}
        axes.plot(list(rewards), list(rewards.values()), "-", color=color, alpha=0.3)
    axes.plot([], [], "-", color=INK, alpha=0.3, label="mean reward of the iteration")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("iterations of GRPO, 64 answers each")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    figure.savefig(PICTURE, dpi=130)


def said(result: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Return the sentence under the picture."""
    seeds = len(result["seeds"])
    return [
        f"SmolLM2-135M-Instruct on two cores of {machine()['cpu']}: held-out accuracy went from "
        f"{result['before']:.2f} to {result['after']:.2f}"
        f"{f' in the mean of {seeds} seeds' if seeds > 1 else ''} in {summary['iterations']} "
        f"iterations of GRPO. Only a right last number was rewarded."
    ]


def table(rows: dict[int, Row]) -> list[str]:
    """Return metrics by iteration, as Markdown."""
    lines = [f"| iteration | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for iteration in ITERATIONS:
        if iteration in rows:
            cells = [cell(rows[iteration]) for cell in SHOWN.values()]
            lines.append(f"| {iteration} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    runs = {seed: measured(seed) for seed in arguments.seeds}
    summaries = [summary for summary, _ in runs.values()]
    before = [summary["accuracy_before"] for summary in summaries]
    after = [summary["accuracy_after"] for summary in summaries]
    result = {
        "before": fmean(before),
        "after": fmean(after),
        "least_gain": min(b - a for a, b in zip(before, after, strict=True)),
        "wall_s": summaries[0]["wall_s"],
        "cpu_s": summaries[0]["cpu_s"],
        "seeds": arguments.seeds,
    }
    if arguments.save:
        draw({seed: rows for seed, (_, rows) in runs.items()})
        for page in ("README.md", "docs/quickstart.md"):
            write_block(ROOT / page, "quickstart", said(result, summaries[0]))
        write_block(
            ROOT / "docs" / "small-model.md", "quickstart", table(runs[arguments.seeds[0]][1])
        )
    report("quickstart", result, arguments.save)


if __name__ == "__main__":
    main()
