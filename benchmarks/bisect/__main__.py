"""Bisect runs with a planted fault, and sound ones with a noisy curve.

    python -m benchmarks.bisect [--only WORD] [--folder DIR] [--seed N] [--picture FILE] [--save]

An iteration is right if it is that of the fault, or one beside it; a cause, if it is the fault's;
where no cause is known for it, all rollouts that are named have to be the fault's.
A sound run in which anything is found is a false finding. Runs are trained into the folder, and
kept there. ``--seed`` is added to their seeds, which gives runs on which no bound was chosen.
``--picture`` writes the curve of the last case; ``--save`` also writes the table of docs/bisect.md.
The last line is JSON.
"""

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.bisect.cases import CASES, Case
from benchmarks.bisect.task import prepare, write_config
from benchmarks.support.results import parser_of, report, write_block
from lightning_rl.cli import main as lightning_rl
from lightning_rl.cli.bisect import bisect
from lightning_rl.cli.bisect.page import curve_of
from lightning_rl.cli.bisect.search import Bisection
from lightning_rl.cli.rerun.what_if import rollouts_of

PAGE = Path(__file__).parents[2] / "docs" / "bisect.md"
COLOURS = {"var(--accent)": "#4457d6", "var(--bad)": "#c8102e", "var(--good)": "#16794c"}


def trained(case: Case, folder: Path, seed: int = 0) -> Path:
    """Return the run directory of a case, which is trained unless it was.

    Args:
        case: the case.
        folder: for the runs of all cases.
        seed: is added to that of the case.
    """
    here = folder / case.name
    run = here / "runs" / "version_0"
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    if not (run / "summary.json").exists():
        config = case.make(folder)
        config["seed_everything"] += seed
        write_config(here / "config.yaml", config)
        if lightning_rl(["fit", "--config", "config.yaml"]) != 0:
            raise RuntimeError(f"{case.name} could not be trained")
    return run


def examined(case: Case, found: Bisection, seconds: float) -> dict[str, Any]:
    """Return what a bisection says of a case, and whether that is right."""
    cause = None if found.suspicion is None else found.suspicion.cause
    iteration, onset, suspects = found.iteration, case.onset, found.suspects
    near = iteration is not None and onset is not None and abs(iteration - onset) <= 1
    halved = cause is None and suspects and all(map(case.at_fault, suspects))
    named = rollouts_of(len(suspects)) if suspects else None
    return {
        "name": case.name,
        "onset": onset,
        "iteration": iteration,
        "cause": named if cause is None else cause.value,
        "iteration_right": near,
        "cause_right": near and (cause in case.causes or bool(halved)),
        "seconds": round(seconds),
    }


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return a table with a line per case."""
    lines = ["| run | fault from iteration | found | cause named |", "|---|---|---|---|"]
    for one in results:
        cells = (one[key] for key in ("name", "onset", "iteration", "cause"))
        lines.append(f"| {' | '.join('none' if cell is None else str(cell) for cell in cells)} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--folder", type=Path, default=Path("runs/bisect"), help="for the runs")
    parser.add_argument("--seed", type=int, default=0, help="is added to the seed of each run")
    parser.add_argument("--picture", type=Path, help="an SVG file for the last curve")
    args = parser.parse_args()
    folder, picture = args.folder.resolve(), args.picture and args.picture.resolve()
    found, told = planted(folder, args.only, args.seed, args.save)
    if picture is not None:
        draw(found, picture)
    report("bisect", told, args.save)


def planted(folder: Path, only: str, seed: int, save: bool) -> tuple[Bisection, dict[str, Any]]:
    """Bisect the cases whose name has a word; return the last verdict, and how many were right."""
    prepare(folder)
    results = []
    for case in [case for case in CASES if only in case.name]:
        run, begin = trained(case, folder, seed), time.monotonic()
        found = bisect(run, window=case.window, page=Path("bisect.html"))
        results.append(examined(case, found, time.monotonic() - begin))
        print(results[-1], flush=True)
    faulty = [one for one in results if one["onset"] is not None]
    sound = [one for one in results if one["onset"] is None]
    told = {
        "runs": len(faulty),
        "iteration_right": sum(one["iteration_right"] for one in faulty),
        "cause_right": sum(one["cause_right"] for one in faulty),
        "sound_runs": len(sound),
        "false_findings": sum(one["iteration"] is not None for one in sound),
    }
    if save:
        write_block(PAGE, "bisect", table(results))
    return found, told | {"cases": results}


def draw(found: Bisection, picture: Path) -> None:
    """Write the curve of a bisection as an SVG file by itself."""
    drawn = curve_of(found).replace("<svg", "<svg xmlns='http://www.w3.org/2000/svg'", 1)
    for name, colour in COLOURS.items():
        drawn = drawn.replace(name, colour)
    picture.write_text(drawn + "\n")


if __name__ == "__main__":
    main()
