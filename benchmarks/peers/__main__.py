"""What does an iteration, and reaching 0.90, cost with this library and with TRL's GRPOTrainer?

    python -m benchmarks.peers [--threads 1 2] [--save]

The quickstart's warm-started model, its prompts, 32 x 8 completions, learning rate 1e-4,
temperature 1, no KL, one update per iteration, float32. TRL 1.16.0 lives in an environment of its
own, `build/peers-venv`, which the first run makes (set PIP_FIND_LINKS to where a CPU wheel of torch
lies). It generates with transformers, padded or with continuous batching, or with vLLM, colocated
and synced by a shim (benchmarks/peers/trl_vllm.py): the fastest on each task is compared. Its other
settings are the best we know (benchmarks/peers/trl.py).

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

from pathlib import Path
from typing import Any

from benchmarks.peers.layouts import make_environment
from benchmarks.peers.tables import print_table, ratios, table
from benchmarks.peers.tasks import heavy_task, long_task, quick_task
from benchmarks.peers.turns import measure
from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.task import prepare

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


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
