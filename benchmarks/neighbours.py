"""What does a busy process on the same two cores cost a run, and what does it cost without one?

    python -m benchmarks.neighbours [--runs 3] [--spins 10000 100000] [--trl] [--save]

OpenMP's threads spin where they wait, and a core on which one spins does nothing for whoever it
waits for. `sort_digits` trains with `TransformersEngine` on two threads: spinning as libgomp does
by itself (GOMP_SPINCOUNT=300000), as the command has it
(`lightning_rl/run/processes/openmp.py`), and passively (OMP_WAIT_POLICY), each alone on the machine
and beside a process that uses one core; in turns. `--spins`: other spin counts too. `--trl`: TRL
too, with its defaults.

The last line is JSON: `quiet`, the library's / spinning, both alone; `busy`, the library's beside
the neighbour / its fair share: what it takes alone, times 3 / 2, since of three busy threads on two
cores two are its own; `spinning_busy` and `passive_busy`, the same of the others; `passive_quiet`;
`busy_trl`, of TRL beside the neighbour / TRL alone, and `busy_ours`, the same of the library.
Figures are medians of iterations after the first two of each run.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.peers.layouts import make_environment
from benchmarks.peers.tasks import NEVER, quick_task
from benchmarks.support.quiet import require_quiet, take_cores
from benchmarks.support.results import parser_of, report
from benchmarks.support.task import prepare
from benchmarks.wall.defaults import run_ours, run_theirs

SIDES = {
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "ours": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
OPTIONS = ["--data.engine", "TransformersEngine"]
FAIR = 3 / 2


@contextmanager
def neighbour() -> Iterator[None]:
    """Run a process that uses as much of one core as it gets."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(runs: list[dict[str, Any]]) -> float:
    return statistics.median(s for run in runs for s in run["wall_s"][2:])


def measure(runs: int, spins: list[int], trl: bool) -> dict[str, Any]:
    """Return seconds per iteration of each side: ``quiet``, or ``busy`` beside a neighbour."""
    task = replace(quick_task(8), goal=NEVER)
    sides = SIDES | {f"{count} spins": {"GOMP_SPINCOUNT": str(count)} for count in spins}
    names = [*sides, *(["trl"] if trl else [])]
    done: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(runs):
        for where in ("quiet", "busy"):
            for name in names[:: -1 if turn % 2 else 1]:
                with neighbour() if where == "busy" else nullcontext():
                    if name == "trl":
                        run = run_theirs(task, turn)
                    else:
                        run = run_ours(task, OPTIONS, {"OMP_NUM_THREADS": "2"} | sides[name])
                done.setdefault((name, where), []).append(run)
                print(f"{where:<6}{name:<13}{seconds([run]):.3f} s per iteration", flush=True)
    return {name: {w: seconds(done[name, w]) for w in ("quiet", "busy")} for name in names}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    spinning, ours, passive = (found[name] for name in ("spinning", "ours", "passive"))
    result = {
        "quiet": ours["quiet"] / spinning["quiet"],
        "busy": ours["busy"] / (FAIR * ours["quiet"]),
        "spinning_busy": spinning["busy"] / (FAIR * spinning["quiet"]),
        "passive_busy": passive["busy"] / (FAIR * passive["quiet"]),
        "passive_quiet": passive["quiet"] / spinning["quiet"],
        "busy_ours": ours["busy"] / ours["quiet"],
    }
    if "trl" in found:
        result["busy_trl"] = found["trl"]["busy"] / found["trl"]["quiet"]
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--spins", type=int, nargs="*", default=[])
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--max-load", type=float, default=0.5)
    arguments = parser.parse_args()
    require_quiet(arguments.max_load)
    take_cores(2)
    prepare()
    if arguments.trl:
        make_environment()
    found = measure(arguments.runs, arguments.spins, arguments.trl)
    result = {"seconds": found, **ratios(found)}
    report("neighbours", result, arguments.save)


if __name__ == "__main__":
    main()
