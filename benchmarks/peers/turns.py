"""Run both sides on one task, in turns."""

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.peers.layouts import (
    GENERATIONS,
    Layout,
    counted,
    explore,
    fastest_of,
    run_ours,
    run_trl,
    summary,
)
from benchmarks.peers.tasks import NEVER, Task


def measure(task: Task, seeds: list[int], threads: int) -> dict[str, Any]:
    """Run both sides, alternating; the order changes with every seed."""
    generation, trials = fastest_generation(task, threads)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    sides = {
        "ours": lambda seed: run_ours(task, seed, Layout(threads)),
        "trl": lambda seed: run_trl(task, seed, Layout(threads, generation=generation)),
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


def fastest_generation(task: Task, threads: int) -> tuple[str, dict[str, float | str]]:
    """Return TRL's fastest way to generate on this task, and CPU seconds per iteration of each."""
    trial = replace(task, iterations=min(4, task.iterations), goal=NEVER)
    layouts = {name: Layout(threads, generation=name) for name in GENERATIONS}
    tried = explore(trial, layouts, run_trl, "cpu_s")
    return fastest_of(tried)[0], tried
