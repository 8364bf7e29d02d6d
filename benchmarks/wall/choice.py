"""Choose layouts of both sides that are fast enough to be compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.peers.layouts import (
    GENERATIONS,
    Layout,
    Side,
    explore,
    fastest_of,
    run_ours,
    run_trl,
)
from benchmarks.peers.tasks import (
    NEVER,
    Task,
    heavy_task,
    huge_task,
    large_task,
    long_task,
    longer_task,
    quick_task,
)

TASKS: dict[str, tuple[Callable[[int], Task], int]] = {
    "quickstart": (quick_task, 40),
    "longer": (longer_task, 6),
    "heavy": (heavy_task, 3),
    "long": (long_task, 3),
    "large": (large_task, 3),
    "huge": (huge_task, 3),
}
"""The tasks, with the most iterations of a run."""
CORES = 2
SHAPES = {
    "2 processes": Layout(processes=CORES),
    "2 threads": Layout(threads=CORES),
    "1 thread": Layout(),
}


def each_with(generations: Iterable[str]) -> dict[str, Layout]:
    """Return all shapes, each with all ways to generate."""
    return {
        f"{generation}, {shape}": replace(layout, generation=generation)
        for shape, layout in SHAPES.items()
        for generation in generations
    }


OURS = each_with(("vllm", "transformers")) | {
    "vllm, streamed by 16": Layout(streamed=16),
    "vllm, streamed by 32": Layout(streamed=32),
    "vllm, 2 processes, streamed by 16": Layout(processes=CORES, streamed=16),
}
TRL = each_with(GENERATIONS)
SIDES: dict[str, tuple[Side, Mapping[str, Layout]]] = {
    "ours": (run_ours, OURS),
    "trl": (run_trl, TRL),
}
SLOW, NEAR = 1.5, 1.1
"""Times the fastest: from here on a generation is out; up to here a layout is a finalist too."""


def choose(task: Task) -> dict[str, dict[str, float | str]]:
    """Return wall seconds per iteration of each layout in a short run, or why it has none."""
    trial = replace(task, iterations=min(5, max(2, task.iterations // 2)), goal=NEVER)
    ours = explore(trial, OURS, run_ours, "wall_s")
    two = {name: layout for name, layout in TRL.items() if layout.processes > 1}
    trl = explore(trial, two, run_trl, "wall_s")
    slow = slow_generations(trl)
    left: dict[str, Layout] = {}
    for name, layout in TRL.items():
        if layout.generation in slow and name not in two:
            trl[name] = f"not tried: {slow[layout.generation]}"
        elif name not in two:
            left[name] = layout
    return {"ours": ours, "trl": trl | explore(trial, left, run_trl, "wall_s")}


def slow_generations(tried: Mapping[str, float | str]) -> dict[str, str]:
    """Return the ways that are out after they ran on two processes, and why."""
    ran = {name: result for name, result in tried.items() if isinstance(result, float)}
    best = min(ran.values(), default=0.0)
    return {
        TRL[name].generation: f"{seconds / best:.1f} times the fastest in 2 processes"
        for name, seconds in ran.items()
        if seconds > SLOW * best
    }


def on_one_thread(name: str) -> str:
    """Return the layout of ours that does the same with one thread."""
    return f"{OURS[name].generation}, 1 thread"


def with_one_thread(names: Sequence[str]) -> list[str]:
    """Return these layouts of ours, and those of one thread to compare them with."""
    return list(dict.fromkeys([*names, *map(on_one_thread, names)]))


def finalists(tried: Mapping[str, float | str], most: int) -> list[str]:
    """Return up to ``most`` layouts that are nearly as fast as the first."""
    names = fastest_of(tried)[:most]
    return [name for name in names if float(tried[name]) <= NEAR * float(tried[names[0]])]
