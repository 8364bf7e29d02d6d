"""What does an iteration, and reaching 0.90, cost with this library and with TRL's GRPOTrainer?

    python -m benchmarks.peers [--threads 1 2] [--save]

The quickstart's warm-started model, its prompts, 32 x 8 completions, learning rate 1e-4,
temperature 1, no KL, one update per iteration, float32. TRL 1.16.0 lives in an environment of its
own, `build/peers-venv`, which the first run makes (set PIP_FIND_LINKS to where a CPU wheel of torch
lies). It generates with transformers, padded or with continuous batching, or with vLLM, colocated
and synced by a shim (benchmarks/peers_trl_vllm.py): the fastest on each task is compared. Its other
settings are the best we know (benchmarks/peers_trl.py).

Runs alternate, each in a process of its own; seconds are of the training loop, without imports and
start-up (`setup_cpu_s`). Tasks: `quickstart`, completions of at most 10 tokens, until the mean
sampled reward of three iterations is 0.90; `heavy`, a few iterations of the same with lengths from
a Pareto distribution, up to 100 digits; `long`, a few with prompts of 512 tokens (random digits
before the task). The last line is JSON, of the first number of threads, with the others under their
number. All ratios are TRL / ours: `cpu_ratio` of CPU seconds to 0.90, `iteration_ratio` of the
median iteration, `heavy_ratio` and `long_prompt_ratio` the same on these tasks; `wall_ratio` is of
wall seconds per iteration on the quickstart task, which tells something on an idle machine only.
`--save` also writes the table of one thread, if it comes first, into docs/benchmarks.md.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers_layouts import (
    GENERATIONS,
    Layout,
    counted,
    explore,
    fastest_of,
    make_environment,
    run_ours,
    run_trl,
    summary,
)
from benchmarks.peers_tasks import NEVER, Task, heavy_task, long_task, quick_task
from benchmarks.results import parser_of, report, write_block
from benchmarks.task import prepare

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
TITLES = {"quickstart": "quickstart", "heavy": "heavy tails", "long": "long prompts"}


def measure(task: Task, seeds: list[int], threads: int) -> dict[str, Any]:
    """Both sides, alternating; the order changes with every seed."""
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
    """TRL's fastest way to generate on this task, and CPU seconds per iteration of each."""
    trial = replace(task, iterations=min(4, task.iterations), goal=NEVER)
    layouts = {name: Layout(threads, generation=name) for name in GENERATIONS}
    tried = explore(trial, layouts, run_trl, "cpu_s")
    return fastest_of(tried)[0], tried


def print_table(results: dict[str, Any]) -> None:
    columns = {
        "cpu_s_per_iteration": "CPU s/iter",
        "wall_s_per_iteration": "wall s/iter",
        "tokens_per_wall_s": "tokens/s",
        "iterations": "iterations",
        "cpu_s": "CPU s",
        "wall_s": "wall s",
        "setup_cpu_s": "set-up",
        "peak_rss_gib": "RSS GiB",
    }
    print(f"\n{'':17}" + "".join(f"{title:>12}" for title in columns.values()))
    for task, sides in results.items():
        for name in ("ours", "trl"):
            row = "".join(f"{sides[name][key]:12.4g}" for key in columns)
            print(f"{task:<11}{name:<6}{row}")


def table(results: dict[str, Any]) -> list[str]:
    """Markdown, a task and a side a line; what it takes to 0.90 only where a run goes on to it."""
    lines = [
        "| one thread | CPU s per iteration | tokens per second | iterations to 0.90 "
        "| CPU s to 0.90 | set-up, CPU s | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, title in TITLES.items():
        for name, side in (("ours", "ours"), ("TRL", "trl")):
            found = results[task][side]
            to_goal = f"{found['iterations']:.0f} | {found['cpu_s']:#.3g}"
            lines.append(
                f"| {title}, {name} | {found['cpu_s_per_iteration']:#.3g} "
                f"| {found['tokens_per_wall_s']:,.0f} "
                f"| {to_goal if task == 'quickstart' else '|'} "
                f"| {found['setup_cpu_s']:.1f} | {found['peak_rss_gib']:.2f} |"
            )
    return lines


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """TRL / ours."""

    def ratio(task: str, key: str) -> float:
        return float(results[task]["trl"][key] / results[task]["ours"][key])

    return {
        "cpu_ratio": ratio("quickstart", "cpu_s"),
        "iteration_ratio": ratio("quickstart", "cpu_s_per_iteration"),
        "wall_ratio": ratio("quickstart", "wall_s_per_iteration"),
        "heavy_ratio": ratio("heavy", "cpu_s_per_iteration"),
        "long_prompt_ratio": ratio("long", "cpu_s_per_iteration"),
        "iterations_to_goal_ratio": ratio("quickstart", "iterations"),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-iterations", type=int, default=40)
    parser.add_argument("--few", type=int, default=3, help="iterations of heavy and long")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    prepare()
    make_environment()
    quick = quick_task(arguments.max_iterations)
    few = [heavy_task(arguments.few), long_task(arguments.few)]
    by_threads: dict[str, Any] = {}
    for threads in arguments.threads:
        print(f"\n{threads} thread(s)")
        results = {"quickstart": measure(quick, arguments.seeds, threads)}
        results |= {task.name: measure(task, arguments.seeds[:1], threads) for task in few}
        print_table(results)
        by_threads[str(threads)] = ratios(results) | results
        (_, first), *others = by_threads.items()
        # Each time, for the next one takes as long again.
        result = first | {"seeds": arguments.seeds, "threads": dict(others)}
        if arguments.save and arguments.threads[0] == 1:
            write_block(PAGE, "peers", table(result))
        report("peers", result, arguments.save)


if __name__ == "__main__":
    main()
