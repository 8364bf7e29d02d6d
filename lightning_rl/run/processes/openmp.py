"""How long OpenMP's threads spin while they wait for each other, before they sleep.

A spinning thread is ready at once, but beside other work it uses up the time slices of the thread
that it waits for. By default libgomp spins 300,000 times (7.5 ms on an AMD EPYC), which is longer
than a scheduler's time slice: beside one busy process, an iteration takes several times as long.
Threads that never spin make a small model half again as slow on a quiet machine, because its
operations follow each other within microseconds. `python -m benchmarks.neighbours` measures all
three.

libgomp reads its environment when it is loaded, with torch, so this file does not import torch.
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
    """Set how long threads spin, in this process before torch is imported, and in its children.

    Returns:
        False if the environment already says how threads wait; the user's choice is kept.
    """
    if any(name in os.environ for name in _CHOSEN):
        return False
    os.environ[WAITING] = str(SPINS)
    return True


def why_slow() -> str:
    """Return advice for a process that loaded libgomp before the variable was set; else ""."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or "libgomp" not in maps.read_text(encoding="utf-8"):
        return ""
    return (
        "OpenMP's threads spin while they wait, so beside other work an iteration takes several "
        f"times as long: run `export {WAITING}={SPINS}` before Python starts, as lightning-rl does"
    )
