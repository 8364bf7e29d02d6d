"""Bisect runs with a planted fault, and sound ones with a noisy curve.

    python -m benchmarks.bisect [--only WORD] [--folder DIR] [--train]

An iteration is right if it is that of the fault, or one beside it; a cause, if it is the fault's.
A sound run in which anything is found is a false finding. Runs are trained into the folder, and
kept there. The last line is JSON.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.bisect.cases import CASES, Case
from benchmarks.bisect.task import prepare, write_config
from lightning_rl.cli import main as lightning_rl
from lightning_rl.cli.bisect import bisect


def trained(case: Case, folder: Path) -> Path:
    """Return the run directory of a case, which is trained unless it was."""
    here = folder / case.name
    run = here / "runs" / "version_0"
    if not (run / "summary.json").exists():
        here.mkdir(exist_ok=True)
        os.chdir(here)
        write_config(here / "config.yaml", case.make(folder))
        if lightning_rl(["fit", "--config", "config.yaml"]) != 0:
            raise RuntimeError(f"{case.name} could not be trained")
    return run


def examined(case: Case, folder: Path) -> dict[str, object]:
    """Return what a bisection says of a case, and whether that is right."""
    run = trained(case, folder)
    os.chdir(folder / case.name)
    begin = time.monotonic()
    verdict = bisect(run, window=case.window, page=Path("bisect.html"))
    found = verdict.iteration
    cause = None if verdict.suspicion is None else verdict.suspicion.cause
    near = found is not None and case.onset is not None and abs(found - case.onset) <= 1
    return {
        "name": case.name,
        "onset": case.onset,
        "iteration": found,
        "cause": None if cause is None else cause.value,
        "iteration_right": near,
        "cause_right": near and cause in case.causes,
        "seconds": round(time.monotonic() - begin),
    }


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.bisect", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--folder", type=Path, default=Path("runs/bisect"), help="for the runs")
    parser.add_argument("--train", action="store_true", help="only train the runs")
    args = parser.parse_args()
    folder = args.folder.resolve()
    prepare(folder)
    results = []
    for case in [case for case in CASES if args.only in case.name]:
        if args.train:
            trained(case, folder)
            continue
        results.append(examined(case, folder))
        print(json.dumps(results[-1]), flush=True)
    faulty = [one for one in results if one["onset"] is not None]
    sound = [one for one in results if one["onset"] is None]
    told = {
        "runs": len(faulty),
        "iteration_right": sum(bool(one["iteration_right"]) for one in faulty),
        "cause_right": sum(bool(one["cause_right"]) for one in faulty),
        "sound_runs": len(sound),
        "false_findings": sum(one["iteration"] is not None for one in sound),
    }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
