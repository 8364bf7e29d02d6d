"""How long do this library and TRL's GRPOTrainer take on both of a machine's cores?

    python -m benchmarks.wall [--tasks quickstart long] [--runs 5] [--save]
    python -m benchmarks.wall --defaults [--runs 3] [--save]
    python -m benchmarks.wall --choose; python -m benchmarks.wall --chosen --finalists 1 --save

Wall seconds, each side in the layout of its own that is fastest on the task. Ours: generation with
vLLM or with `TransformersEngine`, each with one or two threads, in two processes of a thread each,
or with vLLM streamed (the engine in one thread, the trainer in another; 16 or all 32 groups in
flight; in one process or two). TRL 1.16: generation padded, with
continuous batching or with vLLM, each with one or two threads, or in two processes through
accelerate. A short run of each finds every side's fastest, and the next if it is nearly as fast;
what fails or is given up is named with the reason. Then these finalists and our single thread run
in turns, each in processes of its own. Figures are medians over their runs, of iterations after the
first; sides, batches and settings those of `benchmarks/peers.py`. The last line is the same in
two halves, and shorter. `--defaults` compares what each side does where nothing is chosen, on the
quickstart and on `large` (`benchmarks/wall_defaults.py`), and its last line is JSON with
`default_ratio_<task>` (TRL / ours, wall seconds per iteration) and `default_whole_ratio_<task>` (of
whole commands). `--save` keeps what was saved of tasks that are not named.

Tasks (`benchmarks/peers_tasks.py`): `quickstart`, to a sampled reward of 0.90; `longer`, 10-token
prompts with completions of about 28 tokens, nearly equal in length; `heavy`, lengths from a Pareto
distribution; `long`, prompts of 512 tokens; `large` and `huge`, the quickstart with 27M and with
109M parameters. On `long` no rollout earns a reward, and of a group that is worth the same
throughout ours trains on nothing.

The last line is JSON: `ratio_<task>` (TRL / ours, wall seconds per iteration), the smallest as
`ratio_min`; `goal_ratio`, of wall seconds to 0.90, if both get there; `two_over_one_<task>`, ours
on one thread, with the same engine / in the best layout; `floor_ratio_<task>`, ours in the best
layout / the floor for two cores; `two_over_one` and `floor_ratio` are the quickstart's. The floor
is min((g + t + r) / 2, max(g, t)) of what an iteration on one thread spends on generating (g),
training (t) and the rest (r): all halved, or both at once on a core each, the rest for nothing.

Refuses to start where something else runs, or with fewer than two cores; of more it takes two.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers_layouts import (
    GENERATIONS,
    Layout,
    Side,
    counted,
    explore,
    fastest_of,
    make_environment,
    run_ours,
    run_trl,
    summary,
)
from benchmarks.peers_tasks import (
    BUILD,
    NEVER,
    Task,
    heavy_task,
    huge_task,
    large_task,
    long_task,
    longer_task,
    quick_task,
)
from benchmarks.quiet import require_quiet, take_cores
from benchmarks.results import RESULTS, parser_of, report, write_block
from benchmarks.task import prepare
from benchmarks.wall_defaults import compare, ratios
from benchmarks.wall_tables import front_table, table

ROOT = Path(__file__).parents[1]
CHOSEN = BUILD / "wall-layouts.json"
TASKS: dict[str, tuple[Callable[[int], Task], int]] = {
    "quickstart": (quick_task, 40),
    "longer": (longer_task, 6),
    "heavy": (heavy_task, 3),
    "long": (long_task, 3),
    "large": (large_task, 3),
    "huge": (huge_task, 3),
}
"""With the iterations of a run, at most."""
CORES = 2
SHAPES = {
    "2 processes": Layout(processes=CORES),
    "2 threads": Layout(threads=CORES),
    "1 thread": Layout(),
}


def each_with(generations: Iterable[str]) -> dict[str, Layout]:
    """All shapes, each with all ways to generate."""
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
Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By side and layout."""


# ---------------------------------------------------------------- which layouts


def choose(task: Task) -> dict[str, dict[str, float | str]]:
    """Wall seconds per iteration of each layout of each side in a short run, or why it has none."""
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
    """Those that are out after they ran on two processes, and why."""
    ran = {name: result for name, result in tried.items() if isinstance(result, float)}
    best = min(ran.values(), default=0.0)
    return {
        TRL[name].generation: f"{seconds / best:.1f} times the fastest in 2 processes"
        for name, seconds in ran.items()
        if seconds > SLOW * best
    }


def on_one_thread(name: str) -> str:
    """The layout of ours that does the same with one thread."""
    return f"{OURS[name].generation}, 1 thread"


def with_one_thread(names: Sequence[str]) -> list[str]:
    """These layouts of ours, and those of one thread to compare them with."""
    return list(dict.fromkeys([*names, *map(on_one_thread, names)]))


def finalists(tried: Mapping[str, float | str], most: int) -> list[str]:
    """Of ``most`` layouts those that are nearly as fast as the first."""
    names = fastest_of(tried)[:most]
    return [name for name in names if float(tried[name]) <= NEAR * float(tried[names[0]])]


# ---------------------------------------------------------------- what they take


def measure(task: Task, names: Mapping[str, list[str]], runs: int) -> Runs:
    """All finalists in turns; the order changes with every turn."""
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
    """Of each side: its layouts and the best of them; and what they are beside each other."""
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
    """Wall seconds below which two cores cannot bring an iteration that took this on one."""
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
    """The ratios of all tasks."""
    found = {f"ratio_{name}": result["ratio"] for name, result in by_task.items()}
    found["ratio_min"] = min(found.values())
    for key in ("two_over_one", "floor_ratio"):
        found |= {f"{key}_{name}": result[key] for name, result in by_task.items()}
    quickstart = by_task.get("quickstart", {})
    keys = ("two_over_one", "floor_ratio", "goal_ratio")
    found |= {key: quickstart[key] for key in keys if key in quickstart}
    return found


def with_saved(by_task: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """And, of tasks that were left out this time, what was saved before; in their order."""
    file = RESULTS / "wall-cpu.json"
    saved: dict[str, Any] = json.loads(file.read_text())["result"]["tasks"] if file.exists() else {}
    known = {**saved, **by_task}
    return {name: known[name] for name in TASKS if name in known}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--runs", type=int, default=5, help="of each finalist")
    parser.add_argument("--finalists", type=int, default=2, help="of each side, at most")
    parser.add_argument("--choose", action="store_true", help="only find the finalists")
    parser.add_argument("--chosen", action="store_true", help="take those that --choose found")
    parser.add_argument("--defaults", action="store_true", help="what nothing is chosen for")
    parser.add_argument("--max-load", type=float, default=0.7, help="of the minute before")
    parser.add_argument("--quick", action="store_true", help="a trial: 1 run of 2 iterations")
    arguments = parser.parse_args()
    take_cores(CORES)
    load = os.getloadavg()[0] if arguments.quick else require_quiet(arguments.max_load)
    prepare()
    make_environment()
    if arguments.defaults:
        few = 2 if arguments.quick else 28  # as many iterations as the quickstart has
        found = compare(
            [quick_task(few), large_task(few)], 1 if arguments.quick else arguments.runs
        )
        result = ratios(found) | {"load_before": load, "tasks": found}
        report("wall-defaults", result, arguments.save)
        return
    tasks = [
        make(2 if arguments.quick else iterations)
        for make, iterations in (TASKS[name] for name in arguments.tasks)
    ]
    if arguments.choose:
        known = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
        for task in tasks:
            known[task.name] = choose(task)
            CHOSEN.write_text(json.dumps(known))
        return
    chosen: dict[str, Any] = json.loads(CHOSEN.read_text()) if arguments.chosen else {}
    by_task: dict[str, Any] = {}
    for task in tasks:
        tried = chosen[task.name] if arguments.chosen else choose(task)
        most = arguments.finalists
        names = {side: finalists(tried[side], most) for side in SIDES}
        names["ours"] = with_one_thread(names["ours"])
        done = measure(task, names, 1 if arguments.quick else arguments.runs)
        by_task[task.name] = figures(task, done) | {"tried": tried}
    if arguments.save:
        by_task = with_saved(by_task)
    lines = table(by_task)
    print("\n".join(lines))
    if arguments.save:
        write_block(ROOT / "docs" / "benchmarks.md", "wall", lines)
        write_block(ROOT / "README.md", "wall", front_table(by_task))
    report("wall", headline(by_task) | {"load_before": load, "tasks": by_task}, arguments.save)


if __name__ == "__main__":
    main()
