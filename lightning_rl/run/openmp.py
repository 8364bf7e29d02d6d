"""How long OpenMP's threads spin where they wait for each other, before they sleep.

A thread that spins is ready at once; but beside other work it burns the turns of the thread that it
waits for. libgomp spins 300,000 times by itself (7.5 ms on an AMD EPYC), which is longer than a
scheduler's turn: an iteration beside one busy process takes several times as long. Threads that
never spin cost a small model half as much again on a quiet machine, because its operations follow
each other within microseconds. `python -m benchmarks.neighbours` measures all three.

libgomp reads its environment when it is loaded, with torch: hence no import of torch here.
"""

import os
from pathlib import Path

WAITING = "GOMP_SPINCOUNT"
SPINS = 1000
"""26 µs on an AMD EPYC, where 97 % of the waits of a small model's step are shorter. Alone on two
cores such a step took 1.1 times what it takes with libgomp's count (without spinning 1.7), and
beside one busy process 0.8 times (without 0.6); with 3,000 spins 1.1, with 10,000 1.7.
"""
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
