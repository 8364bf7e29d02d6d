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
first; sides, batches and settings those of `benchmarks/peers`. The last line is the same in
two halves, and shorter. `--defaults` compares what each side does where nothing is chosen, on the
quickstart and on `large` (`benchmarks/wall/defaults.py`), and its last line is JSON with
`default_ratio_<task>` (TRL / ours, wall seconds per iteration) and `default_whole_ratio_<task>` (of
whole commands). `--save` keeps what was saved of tasks that are not named.

Tasks (`benchmarks/peers/tasks.py`): `quickstart`, to a sampled reward of 0.90; `longer`, 10-token
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
from pathlib import Path
from typing import Any

from benchmarks.peers.layouts import make_environment
from benchmarks.peers.tasks import BUILD, large_task, quick_task
from benchmarks.support.quiet import require_quiet, take_cores
from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.task import prepare
from benchmarks.wall.choice import CORES, SIDES, TASKS, choose, finalists, with_one_thread
from benchmarks.wall.defaults import compare, ratios
from benchmarks.wall.figures import figures, headline, measure, with_saved
from benchmarks.wall.tables import front_table, table

ROOT = Path(__file__).parents[2]
CHOSEN = BUILD / "wall-layouts.json"


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
