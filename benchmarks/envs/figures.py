"""Summarise `benchmarks/envs`: means, standard errors, and a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.envs.task import FRAMES, Task

TITLES = {
    "ours": "this library",
    "same": "the same, `clip_jointly` and `normalize_minibatches`",
    "torchrl": "torchrl",
    "sb3": "Stable-Baselines3",
    "cleanrl": "CleanRL",
}
OURS = ("ours", "same")
"""The sides that are no peers."""
Runs = dict[str, list[dict[str, Any]]]
"""The results of each side's processes, seed by seed."""


def frames_per_cpu_s(measured: Mapping[str, Any]) -> float:
    """Return the frames per CPU second of all iterations but the first, which warms up."""
    counted = measured["cpu_s"][1:]
    return FRAMES * len(counted) / sum(counted)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, of which nothing is known."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def summary(task: Task, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise one side; the speed is the median of its runs."""
    returns = [statistics.mean(run["returns"]) for run in runs]
    needed = [run["reached"] or task.most for run in runs]
    frames = [float(FRAMES * iterations) for iterations in needed]
    seconds = [sum(run["cpu_s"][:iterations]) for run, iterations in zip(runs, needed, strict=True)]
    return {
        "frames_per_cpu_s": statistics.median(map(frames_per_cpu_s, runs)),
        "frames_to_goal": statistics.mean(frames),
        "frames_to_goal_se": standard_error(frames),
        "reached": sum(run["reached"] is not None for run in runs),
        "cpu_s_to_goal": statistics.mean(seconds),
        "return_mean": statistics.mean(returns),
        "return_se": standard_error(returns),
        "all_frames": frames,
        "all_returns": returns,
        "setup_cpu_s": statistics.median(run["setup_cpu_s"] for run in runs),
        "version": runs[0]["version"],
    }


def of_task(task: Task, runs: Runs) -> dict[str, Any]:
    """Summarise all sides of a task, and the runs of all peers together."""
    sides = {side: summary(task, own) for side, own in runs.items()}
    found: dict[str, Any] = {
        "environment": task.environment,
        "goal": task.goal,
        "frames": FRAMES * task.iterations,
        "most_frames": FRAMES * task.most,
        "seeds": len(runs["ours"]),
        "sides": sides,
    }
    pooled = [run for side, own in runs.items() if side not in OURS for run in own]
    return found | ({"peers": summary(task, pooled)} if pooled else {})


def headline(cartpole: Mapping[str, Any]) -> dict[str, float]:
    """Return our ratios to all peers' runs, and to the one that is best at each."""
    ours = cartpole["sides"]["ours"]
    found = {"frames_to_475": ours["frames_to_goal"], "return_ours": ours["return_mean"]}
    if "peers" not in cartpole:
        return found
    pooled = cartpole["peers"]
    peers = [side for name, side in cartpole["sides"].items() if name not in OURS]
    return found | {
        "frames_to_475_peers": pooled["frames_to_goal"],
        "frames_to_475_best": min(side["frames_to_goal"] for side in peers),
        "return_peers": pooled["return_mean"],
        "return_best": max(side["return_mean"] for side in peers),
        "return_ratio": ours["return_mean"] / pooled["return_mean"],
        "frames_ratio": ours["frames_per_cpu_s"] / max(p["frames_per_cpu_s"] for p in peers),
        "cpu_ratio": min(side["cpu_s_to_goal"] for side in peers) / ours["cpu_s_to_goal"],
    }


def beside_bare(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compare ours with the environment alone and the bare loop; medians over iterations."""
    rows = [row for run in runs for row in run["rows"][1:]]
    return {
        "floor_ratio": statistics.median(row["fit"] / row["alone"] for row in rows),
        "fit_overhead": statistics.median(row["fit"] / row["bare"] for row in rows),
        "alone_frames_per_cpu_s": FRAMES / statistics.median(row["alone"] for row in rows),
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Return a row for each side of each task; means and standard errors."""
    lines = [
        "| one thread | frames to the goal | runs that came there | CPU seconds to the goal | "
        "frames per CPU second | return after a fixed number of frames |",
        "|---|---|---|---|---|---|",
    ]
    for task in result["tasks"].values():
        lines.append(
            f"| **{task['environment']}**, to {task['goal']:,.0f} | of {task['most_frames']:,} | "
            f"of {task['seeds']} | | | after {task['frames']:,} |"
        )
        for name, side in task["sides"].items():
            title = TITLES[name] if name in OURS else f"{TITLES[name]} {side['version']}"
            cells = [
                title,
                f"{side['frames_to_goal']:,.0f} ± {side['frames_to_goal_se']:,.0f}",
                f"{side['reached']}",
                f"{side['cpu_s_to_goal']:.1f}",
                f"{side['frames_per_cpu_s']:,.0f}",
                f"{side['return_mean']:,.0f} ± {side['return_se']:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if "alone_frames_per_cpu_s" in result:
        alone = result["alone_frames_per_cpu_s"]
        lines.append(f"| CartPole-v1 alone | | | | {alone:,.0f} | |")
    return lines
