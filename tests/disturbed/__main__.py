"""Run the tests under other roundings:  python -m tests.disturbed [pytest's arguments]

Both tiers, or what the arguments name, once per line of ``ROUNDS`` that this CPU has the
instructions for. The last lines say how each went; the status is 1 if any failed.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import torch

from tests.disturbed import ROOT, VARIABLE

TIERS = (["tests/unit"], ["tests/integration", "--dist", "loadfile", "-m", "not slow"])
CAPS = {
    # Of PyTorch's own kernels, oneDNN's and MKL's. A cap is not checked: a kernel that the CPU has
    # no instructions for ends the process.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # without bfloat16's own
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
NEEDS = {"avx2": ("AVX2", "AVX512"), "avx512": ("AVX512",)}
"""What PyTorch calls the CPU where a cap is one."""


@dataclass(frozen=True)
class Round:
    """A seed, and the instructions that libraries may use; None: all."""

    seed: int
    cap: str | None = None

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.cap or 'all instructions'}"

    def environment(self) -> dict[str, str]:
        path = [str(ROOT / "tests" / "disturbed" / "start"), str(ROOT)]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        caps = CAPS[self.cap] if self.cap else {}
        return {**os.environ, **caps, "PYTHONPATH": os.pathsep.join(path), VARIABLE: str(self.seed)}


ROUNDS = (Round(1), Round(2, "avx2"), Round(3, "avx512"))


def possible(rounds: tuple[Round, ...]) -> list[Round]:
    """Those that this CPU has the instructions for."""
    capability = torch.backends.cpu.get_cpu_capability()
    return [r for r in rounds if r.cap is None or capability in NEEDS[r.cap]]


def run(round: Round, arguments: list[str]) -> tuple[int, str]:
    """Pytest's status, and the last line that it printed."""
    command = [sys.executable, "-u", "-m", "pytest", "-n", "2", *arguments]
    print(f"\n{round}: {' '.join(command[2:])}", flush=True)
    last = ""
    with subprocess.Popen(
        command, env=round.environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
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
    for round in rounds:
        for tier in [arguments] if arguments else TIERS:
            status, last = run(round, tier)
            failed |= status != 0
            told.append(f"{round}, {tier[0]}: {last}")
    print("", *told, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
