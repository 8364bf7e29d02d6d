"""What does GRPO add to a small model on eight tasks of reasoning-gym?

    python -m benchmarks.reasoning [--seeds 0 1 2] [--save]

Runs recipes/reasoning_gym: its data and model, its warm start unless it is there already, then GRPO
once per seed, a process each. All seeds begin at the same warm-started model. The result of a seed
is kept in runs/reasoning_gym/seeds as soon as it is done, and read from there the next time: so
seeds can be measured side by side, and a run that was cut off goes on. Delete the folder to measure
again.

The last line is JSON: accuracy on held-out questions before and after, of all and of each task, the
mean over the seeds, and the seeds. ``--save`` also keeps it in benchmarks/results and draws the
figure of the recipe's page. Takes about an hour on two cores.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reasoning_plot import draw
from benchmarks.results import parser_of, report
from benchmarks.seeds import fitted
from recipes.reasoning_gym.prepare import TASKS, prepare

OUT = Path("runs/reasoning_gym")
MODEL = OUT / "sft" / "hf"
RECIPE = "recipes/reasoning_gym"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "reasoning-gym-curves.png"


def warm_start() -> None:
    """Make the recipe's data and warm-started model, if they are not there yet."""
    prepare(OUT)
    if not (MODEL / "config.json").exists():
        command = ["-m", "lightning_rl", "fit", "--config", f"{RECIPE}/sft.yaml"]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)


def measure(seed: int, overrides: list[str]) -> dict[str, Any]:
    """One seed's curves, by what they are of: iterations, and accuracy at each."""
    summary, rows = fitted(f"{RECIPE}/grpo.yaml", seed, overrides)
    evaluated = [row for row in rows if "eval/accuracy" in row]
    return {
        "seed": seed,
        "iterations": [row["iteration"] for row in evaluated],
        "accuracy": [row["eval/accuracy"] for row in evaluated],
        "tasks": {task: [row[f"eval/{task}/accuracy"] for row in evaluated] for task in TASKS},
        "cpu_s": summary["cpu_s"],
        "wall_s": summary["wall_s"],
    }


def measured(seed: int, overrides: list[str]) -> dict[str, Any]:
    """The result of a seed, from its file if it is there."""
    path = OUT / "seeds" / f"{seed}.json"
    if not path.exists():
        result = measure(seed, overrides)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def ends(curves: list[list[float]]) -> dict[str, float]:
    """The first and the last of a curve, the mean over seeds."""
    return {
        "before": fmean(curve[0] for curve in curves),
        "after": fmean(curve[-1] for curve in curves),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, overrides = parser.parse_known_args()
    warm_start()
    runs = []
    print("seed  before  after  CPU s")
    for seed in arguments.seeds:
        run = measured(seed, overrides)
        runs.append(run)
        first, last = run["accuracy"][0], run["accuracy"][-1]
        print(f"{seed:<5} {first:.3f}   {last:.3f}  {run['cpu_s']:.0f}", flush=True)
    tasks = {task: ends([run["tasks"][task] for run in runs]) for task in TASKS}
    for task, end in tasks.items():
        print(f"{task:<24} {end['before']:.3f}   {end['after']:.3f}")
    if arguments.save:
        draw(runs, tasks, str(FIGURE))
    overall = ends([run["accuracy"] for run in runs])
    result = {f"accuracy_{when}": value for when, value in overall.items()}
    report("reasoning-gym", result | {"tasks": tasks, "seeds": runs}, arguments.save)


if __name__ == "__main__":
    main()
