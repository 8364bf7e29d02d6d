"""What does GRPO add to a small model that sees, on three tasks with pictures?

    python -m benchmarks.vision_recipe [--seeds 0 1 2] [--save]

Runs recipes/vision: its pictures and model, its warm start unless it is there already, then GRPO
once per seed, a process each. The result of a seed is kept in runs/vision/seeds as soon as it is
done, and read from there the next time: so seeds can be measured side by side, and a run that was
cut off goes on. Delete the folder to measure again.

The last line is JSON: accuracy on held-out questions before and after, of all and of each task, the
mean over the seeds, and the seeds. ``--save`` also keeps it in benchmarks/results, and writes the
table and the figure of the recipe's page.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.seeds import fitted
from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.seed_curves import draw
from recipes.vision.draw import TASKS

OUT = Path("runs/vision")
RECIPE = "recipes/vision"
PAGE = Path(__file__).parents[1] / RECIPE / "README.md"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "vision-curves.png"
PICTURE = (
    "![Held-out accuracy over iterations, and of each task before and after]"
    "(../../docs/images/vision-curves.png)"
)


def measure(seed: int) -> dict[str, Any]:
    """Measure one seed's curves, by what they are of: iterations, and accuracy at each."""
    summary, rows = fitted(f"{RECIPE}/grpo.yaml", seed, [])
    evaluated = [row for row in rows if "eval/accuracy" in row]
    return {
        "seed": seed,
        "iterations": [row["iteration"] for row in evaluated],
        "accuracy": [row["eval/accuracy"] for row in evaluated],
        "tasks": {task: [row[f"eval/{task}/accuracy"] for row in evaluated] for task in TASKS},
        "cpu_s": summary["cpu_s"],
        "wall_s": summary["wall_s"],
    }


def measured(seed: int, out: Path = OUT) -> dict[str, Any]:
    """Return the result of a seed, from its file if it is there."""
    path = out / "seeds" / f"{seed}.json"
    if not path.exists():
        result = measure(seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def ends(curves: list[list[float]]) -> dict[str, float]:
    """Return the first and the last of a curve, the mean over seeds."""
    return {
        "before": fmean(curve[0] for curve in curves),
        "after": fmean(curve[-1] for curve in curves),
    }


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise accuracy before and after, of all questions and each task; and the runs."""
    overall = ends([run["accuracy"] for run in runs])
    return {
        "accuracy_before": overall["before"],
        "accuracy_after": overall["after"],
        "tasks": {task: ends([run["tasks"][task] for run in runs]) for task in TASKS},
        "seeds": runs,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown with a column per seed, a row per task, before → after."""
    runs = result["seeds"]
    seeds = [f"seed {run['seed']}" for run in runs]
    lines = [f"| task | {' | '.join(seeds)} | mean |", "|---" * (len(seeds) + 2) + "|"]
    for task, mean in result["tasks"].items():
        curves = [run["tasks"][task] for run in runs]
        lines.append(_row(f"`{task}`", curves, mean["before"], mean["after"]))
    curves = [run["accuracy"] for run in runs]
    lines.append(_row("all", curves, result["accuracy_before"], result["accuracy_after"]))
    return lines


def _row(name: str, curves: list[list[float]], before: float, after: float) -> str:
    pairs = [(curve[0], curve[-1]) for curve in curves]
    cells = [f"{first:.2f} → {last:.2f}" for first, last in [*pairs, (before, after)]]
    return f"| {' | '.join([name, *cells])} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "recipes.vision.warm_start", "--out", str(OUT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    runs = [measured(seed) for seed in arguments.seeds]
    result = summary_of(runs)
    lines = table(result)
    print("\n".join(lines))
    if arguments.save:
        write_block(PAGE, "vision", [PICTURE, "", *lines])
        title = f"Held-out accuracy, all {len(TASKS)} tasks"
        draw(result["seeds"], result["tasks"], str(FIGURE), title)
    report("vision-recipe", result, arguments.save)


if __name__ == "__main__":
    main()
