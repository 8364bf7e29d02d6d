"""Rehearse a corpus: configurations with a planted fault each, and sound ones.

    python -m benchmarks.rehearse [--only WORD] [--after NAME]

A fault is found if the verdict's status is at least 1 and a finding names its key; a sound
configuration for which it is not 0 is a false alarm. The last line is JSON, with the seconds of the
longest rehearsal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from benchmarks.rehearse.corpus import FAULTS, SOUND, Case, prepare_all, tree_of


def rehearsed(case: Case, folder: Path) -> tuple[int, str, float]:
    """Return a rehearsal's exit status, what it printed, and its seconds."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree_of(case, folder)))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rl", "rehearse", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=1800,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


def is_right(case: Case, status: int, said: str) -> bool:
    """Tell whether a rehearsal found the case's fault, or rightly none."""
    harm = said.split("could not be tried:")[0].split("\ntried:")[0]
    return status == 0 if case.key is None else status in (1, 2) and case.key in harm


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rehearse", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--after", help="go on after the case of this name")
    args = parser.parse_args()
    wrong, longest = {True: 0, False: 0}, 0.0
    cases = [*FAULTS, *SOUND]
    begin = [case.name for case in cases].index(args.after) + 1 if args.after else 0
    cases = [case for case in cases[begin:] if args.only in case.name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare_all(folder)
        for case in cases:
            status, said, seconds = rehearsed(case, folder)
            good = is_right(case, status, said)
            wrong[case.key is None] += not good
            longest = max(longest, seconds)
            what = "right" if good else f"WRONG (status {status})\n{said}"
            print(f"{case.name}: {what}, {seconds:.0f} s", flush=True)
    faults = sum(case.key is not None for case in cases)
    found = {"faults": faults, "found": faults - wrong[False], "false_alarms": wrong[True]}
    print(json.dumps(found | {"seconds_max": round(longest)}))
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
