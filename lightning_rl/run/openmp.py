"""How long OpenMP's threads spin where they wait for each other, before they sleep.

A thread that spins is ready at once; but beside other work it burns the turns of the thread that it
waits for. libgomp spins 300,000 times by itself, which takes longer than a scheduler's turn: an
iteration beside one busy process takes several times as long. Threads that never spin cost a small
model half as much again on a quiet machine, because its operations follow each other within
microseconds. `python -m benchmarks.neighbours` measures both.

libgomp reads its environment when it is loaded, with torch: hence no import of torch here.
"""

import os
from pathlib import Path

WAITING = "GOMP_SPINCOUNT"
SPINS = 10_000
"""About as long as a few operations of a small model, and a tenth of a scheduler's turn or less."""
_CHOSEN = (WAITING, "OMP_WAIT_POLICY")


def spin_briefly() -> bool:
    """Set how long threads spin, for this process before torch is imported, and those it starts.

    Returns:
        False where the environment says how threads wait: the user's choice stays.
    """
    if any(name in os.environ for name in _CHOSEN):
        return False
    os.environ[WAITING] = str(SPINS)
    return True


def why_slow() -> str:
    """Say what a process that loaded libgomp before the variable was set should do; else ""."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or "libgomp" not in maps.read_text(encoding="utf-8"):
        return ""
    return (
        "OpenMP's threads spin where they wait, and beside other work an iteration takes several "
        f"times as long: `export {WAITING}={SPINS}` before Python starts, as lightning-rl does"
    )
