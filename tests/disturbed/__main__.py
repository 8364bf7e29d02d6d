"""Run the tests as other CPUs would round:  python -m tests.disturbed [pytest's arguments]

It runs both tiers, or what the arguments name, once for each of ``ROUNDS`` that this CPU has the
instructions for. Then it lists the margin of each numerical assertion (``margins.py``) and how each
round went; the ten smallest margins stand in the last lines. The status is 1 if a test failed or a
margin is below ``LEAST``.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.disturbed import CAPS, ROOT, VARIABLE
from tests.disturbed.margins import FOLDER, read

TIERS = (
    ["tests/unit", "-m", "not slow"],
    ["tests/integration", "-m", "not slow", "--dist", "loadfile"],
)
NEEDS = {"default": ("DEFAULT", "AVX2", "AVX512"), "avx2": ("AVX2", "AVX512")}
"""PyTorch's names of the CPUs that have the instructions of a cap."""
LEAST = 4.0


@dataclass(frozen=True)
class Round:
    """A seed, the instructions that libraries may use (None: all), threads, and other draws.

    Other draws change more than rounding does, so no margins are taken from such a round: its tests
    have to pass, no more.
    """

    seed: int
    cap: str | None = None
    threads: int = 1
    draws: bool = False

    def __str__(self) -> str:
        draws = ", other draws" if self.draws else ""
        return f"seed {self.seed}, {self.cap or 'all'} instructions, {self.threads} threads{draws}"

    def environment(self) -> dict[str, str]:
        path = [str(ROOT / "tests" / "disturbed" / "start"), str(ROOT)]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        return {
            **os.environ,
            **(CAPS[self.cap] if self.cap else {}),
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": str(self.threads),
            VARIABLE: f"{self.seed}:1:draws" if self.draws else str(self.seed),
        }


ROUNDS = (Round(1), Round(2, "default", threads=2), Round(3, "avx2", draws=True))


def possible(rounds: tuple[Round, ...]) -> list[Round]:
    """Return the rounds that this CPU has the instructions for."""
    capability = torch.backends.cpu.get_cpu_capability()
    return [r for r in rounds if r.cap is None or capability in NEEDS[r.cap]]


def run(round: Round, arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run pytest; return its status and the last line that it printed."""
    workers = [] if "-n" in arguments else ["-n", "2"]
    command = [sys.executable, "-u", "-m", "pytest", *workers, *arguments]
    print(f"\n{round}: {' '.join(command[2:])}", flush=True)
    last = ""
    # Unlike an option, the variable has workers load the plugin before any conftest.
    plugin = {"PYTEST_PLUGINS": "tests.disturbed.margins", FOLDER: str(folder)}
    with subprocess.Popen(
        command, env=round.environment() | plugin, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return process.returncode, last


def main(arguments: list[str]) -> int:
    rounds = possible(ROUNDS)
    told = [f"{r}: left out, this CPU has no {r.cap}" for r in ROUNDS if r not in rounds]
    failed = False
    with TemporaryDirectory() as folder:
        folders = []
        for round in rounds:
            own = Path(folder) / str(round.seed)
            own.mkdir()
            if not round.draws:
                folders.append(own)
            for tier in [arguments] if arguments else TIERS:
                status, last = run(round, tier, own)
                failed |= status != 0
                told.append(f"{round}, {tier[0]}: {last}")
        margins = read(folders)
    moved = [margin for margin in margins if margin.margin < math.inf]
    low = [margin for margin in moved if margin.margin < LEAST]
    print("\nmargins of all assertions that rounding moves:", *moved[:-10], sep="\n")
    print("", *told, sep="\n")
    print(f"{len(margins)} assertions recorded, {len(moved)} moved, {len(low)} below {LEAST:g}")
    print("the smallest margins:", *moved[-10:], sep="\n")
    return int(failed or bool(low))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
