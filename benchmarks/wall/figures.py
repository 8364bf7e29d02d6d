"""Run the chosen layouts in turns, and compute what they tell."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.layouts import counted, summary
from benchmarks.peers.tasks import Task
from benchmarks.support.results import RESULTS
from benchmarks.wall.choice import CORES, SIDES, TASKS, on_one_thread

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""The runs by side and layout."""


def measure(task: Task, names: Mapping[str, list[str]], runs: int) -> Runs:
    """Run all finalists in turns; the order changes with every turn."""
    done: Runs = {side: {name: [] for name in of} for side, of in names.items()}
    order = [(side, name) for side, of in names.items() for name in of]
    for turn in range(runs):
        for side, name in order[:: 1 if turn % 2 else -1]:
            run, layouts = SIDES[side]
            last = run(task, turn, layouts[name])
            done[side][name].append(last)
            print(
                f"{task.name:<11}{side:<5}{name:<34}run {turn}: {len(last['wall_s'])} iterations, "
                f"{sum(last['wall_s']):.1f} wall s, "
                f"{statistics.median(counted([last], 'wall_s')):.3f} each, "
                f"last reward {last['rewards'][-1]:.2f}",
                flush=True,
            )
    return done


def figures(task: Task, done: Runs) -> dict[str, Any]:
    """Return each side's layouts and the best of them, and their ratios to each other."""
    result: dict[str, Any] = {}
    for side, by_layout in done.items():
        layouts = {name: summary(runs, task) for name, runs in by_layout.items()}
        best = min(layouts, key=lambda name: layouts[name]["wall_s_per_iteration"])
        result[side] = {"best": best, "layouts": layouts}
    ours, trl = (result[side]["layouts"][result[side]["best"]] for side in ("ours", "trl"))
    runs = sum(len(done[side][result[side]["best"]]) for side in ("ours", "trl"))
    alone = on_one_thread(result["ours"]["best"])
    one, floor = result["ours"]["layouts"][alone], floor_of(done["ours"][alone])
    each = "wall_s_per_iteration"
    result |= {
        "floor": floor,
        "ratio": trl[each] / ours[each],
        "two_over_one": one[each] / ours[each],
        "floor_ratio": ours[each] / floor["floor"],
    }
    if ours["reached"] + trl["reached"] == runs:
        result["goal_ratio"] = trl["wall_s"] / ours["wall_s"]
    return result


def floor_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the least wall seconds of two cores for an iteration that took this on one."""
    parts = [part for run in runs for part in run["parts"][1:]]
    names = ("generate", "train", "iteration")
    generate, train, whole = (statistics.median(p[name] for p in parts) for name in names)
    return {
        "generate": generate,
        "train": train,
        "rest": whole - generate - train,
        "floor": min(whole / CORES, max(generate, train)),
    }


def headline(by_task: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Return the ratios of all tasks."""
    found = {f"ratio_{name}": result["ratio"] for name, result in by_task.items()}
    found["ratio_min"] = min(found.values())
    for key in ("two_over_one", "floor_ratio"):
        found |= {f"{key}_{name}": result[key] for name, result in by_task.items()}
    quickstart = by_task.get("quickstart", {})
    keys = ("two_over_one", "floor_ratio", "goal_ratio")
    found |= {key: quickstart[key] for key in keys if key in quickstart}
    return found


def with_saved(by_task: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Add the saved figures of tasks that were left out this time, in order."""
    file = RESULTS / "wall-cpu.json"
    saved: dict[str, Any] = json.loads(file.read_text())["result"]["tasks"] if file.exists() else {}
    known = {**saved, **by_task}
    return {name: known[name] for name in TASKS if name in known}
