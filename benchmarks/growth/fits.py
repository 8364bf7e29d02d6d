"""Fit the exponents by which measured costs grow with a size."""

import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WORK = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """A cost: ``prepare(size)`` returns what is measured; with ``memory`` its allocations, too."""

    name: str
    sizes: Sequence[int]
    prepare: Callable[[int], WORK]
    memory: bool = False


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Fit the slope of log cost against log size over the upper half of the sizes, at least three.

    Raises:
        ValueError: for fewer than three sizes, or what has no logarithm.
    """
    if len(sizes) != len(costs) or len(sizes) < 3:
        raise ValueError(f"{len(sizes)} sizes and {len(costs)} costs; need three or more of both")
    pairs = sorted(zip(sizes, costs, strict=True))[-max(3, (len(sizes) + 1) // 2) :]
    x, y = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def seconds_of(work: WORK) -> float:
    """Return CPU seconds of this process."""
    gc.collect()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def bytes_of(work: WORK) -> float:
    """Return the most that Python had allocated for it at one time."""
    tracemalloc.start()
    try:
        work()
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def measured(cost: Cost, repeats: int) -> dict[str, Any]:
    """Return seconds and bytes by size, and their exponents."""
    seconds = [math.inf] * len(cost.sizes)
    for _ in range(repeats):
        for place, size in enumerate(cost.sizes):
            seconds[place] = min(seconds[place], seconds_of(cost.prepare(size)))
    found = {"sizes": list(cost.sizes), "cpu_s": seconds, "time": exponent(cost.sizes, seconds)}
    if cost.memory:
        allocated = [bytes_of(cost.prepare(size)) for size in cost.sizes]
        found |= {"bytes": allocated, "memory": exponent(cost.sizes, allocated)}
    return found


def summary(costs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return exponents by name, and the worst of them."""
    exponents = {
        f"{name}_{of}": found[of] for name, found in costs.items() for of in ("time", "memory")
        if of in found
    }  # fmt: skip
    worst = max(exponents, key=exponents.__getitem__)
    return {"worst_exponent": exponents[worst], "worst": worst, "exponents": exponents}
