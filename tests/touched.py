"""Run the slow tests that a change touches: python -m tests.touched [pytest's arguments]

`make test` leaves out the tests that are marked `slow`; `make test-all` runs them, and notes in
`.ci/durations.txt` at which commit it did and how long each file took. This command runs the slow
tests of the files that changes since that commit touch: files that changed themselves, or that
import a changed module, directly or by way of `tests/support` or `benchmarks`. Those with the most
changed imports come first, until `BUDGET` worker seconds are spent; what is left out is printed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.house.modules import arrows, modules_of
from tests.support.reports import DURATIONS, ROOT, git, read_durations

BUDGET = float(os.environ.get("BUDGET", 300))
"""Worker seconds; two workers take half as long."""
UNKNOWN = 20.0
"""Assumed of a file that the table does not know yet."""


def imported_by(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module with slow tests imports, directly or through tests and benchmarks."""
    direct: dict[str, set[str]] = {name: set() for name in modules}
    for arrow in arrows(modules):
        direct[arrow.importer].add(arrow.imported)

    def reached(name: str, seen: set[str]) -> set[str]:
        for target in direct[name] - seen:
            seen.add(target)
            if target.startswith(("tests.", "benchmarks.")):
                reached(target, seen)
        return seen

    slow = [name for name in modules if ".test_" in name and "slow" in modules[name].read_text()]
    return {name: reached(name, {name}) for name in slow}


def touched(
    changed: Iterable[Path], modules: dict[str, Path], durations: dict[str, float], budget: float
) -> tuple[list[str], list[str]]:
    """Return files with slow tests to run, and those for which the budget was too small."""
    changed = set(changed)
    names = {name for name, path in modules.items() if path in changed}
    shares = {name: len(found & names) for name, found in imported_by(modules).items()}
    files = {name: modules[name].relative_to(ROOT).as_posix() for name in shares}
    run, left = [], []
    for name in sorted(filter(shares.get, shares), key=lambda name: (-shares[name], name)):
        seconds = durations.get(files[name], UNKNOWN)
        (run if seconds <= budget else left).append(files[name])
        budget -= seconds if seconds <= budget else 0
    return run, left


def changed_since_the_last_whole_run() -> list[Path] | None:
    """Return files that differ from the commit in the table; None where that is unknown."""
    head = DURATIONS.read_text("utf-8").splitlines()[0] if DURATIONS.exists() else ""
    found = re.search(r"of commit (\w+)", head)
    names = git("diff", "--name-only", "-z", found[1]) if found else None
    return None if names is None else [ROOT / name for name in names.split("\0") if name]


def main(arguments: list[str]) -> int:
    changed = changed_since_the_last_whole_run()
    if changed is None:
        print(f"{DURATIONS.name} names no commit that is here; run make test-all")
        return 1
    modules = modules_of(ROOT, "lightning_rl", "callbacks", "benchmarks", "recipes", "tests")
    run, left = touched(changed, modules, read_durations(), BUDGET)
    print(f"{len(changed)} changed files touch {len(run) + len(left)} files of tests")
    print(*(f"left to make test-all: {file}" for file in left), sep="\n")
    if not run:
        return 0
    options = ["-m", "slow", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", *options, *arguments, *run]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == 5 else status  # 5: none of them is slow


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
