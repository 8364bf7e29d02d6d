"""The benchmark measures what a reward in pure Python costs the training step beside it.

    OMP_NUM_THREADS=1 python -m benchmarks.switch_interval [--save]

Two cores that have nothing else to do: torch takes training steps in one thread, and another one
computes in Python, as a plain reward does while a collector prefetches. Torch gives the interpreter
up at each operation, and gets it back after a switch interval at most. For each interval the table
says how many seconds the steps take longer for each CPU second that Python was given, with a step
of many small operations and with one of large ones. 1 is what two threads cost that take turns
fairly on one core. Rounds alternate between intervals, beside rounds without the other thread; each
figure is the median of the rounds. The last line is JSON. Takes about three minutes.
"""

import sys
import threading
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from benchmarks.support.results import parser_of, report

INTERVALS_MS = (5.0, 1.0, 0.5)
ROUNDS = 5
ROUND_S = 3.0


class Python:
    """A thread that computes in Python until the block ends; ``cpu_s`` is what it was given."""

    cpu_s = 0.0

    def __enter__(self) -> "Python":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compute)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _compute(self) -> None:
        start = time.thread_time()
        while not self._stop.is_set():
            sum(i * i for i in range(1000))
        self.cpu_s = time.thread_time() - start


def step_of(width: int, depth: int, tokens: int) -> Callable[[], None]:
    """Return a training step of ``depth`` blocks on so many tokens."""
    blocks = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.0))
        for _ in range(depth)
    ]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(tokens, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], at_least: float) -> tuple[float, int]:
    """Take steps for so many seconds; return the seconds that they took, and their number."""
    start, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < at_least:
        step()
        steps += 1
    return seconds, steps


def cost_of(step: Callable[[], None]) -> dict[str, float]:
    """Measure by how much a second of Python's lengthens steps, by switch interval in ms."""
    costs: dict[str, list[float]] = {str(interval): [] for interval in INTERVALS_MS}
    for _ in range(ROUNDS):
        seconds, steps = seconds_of(step, ROUND_S)
        alone = seconds / steps
        for interval in INTERVALS_MS:
            sys.setswitchinterval(interval / 1000)
            with Python() as python:
                seconds, steps = seconds_of(step, ROUND_S)
            costs[str(interval)].append((seconds - alone * steps) / python.cpu_s)
    return {interval: median(values) for interval, values in costs.items()}


def main() -> None:
    given = parser_of(__doc__).parse_args()
    steps = {"small": step_of(64, 24, 64), "large": step_of(1024, 4, 512)}
    result = {name: cost_of(step) for name, step in steps.items()}
    print(f"{'operations':12}" + "".join(f"{interval:>7} ms" for interval in INTERVALS_MS))
    for name, costs in result.items():
        print(f"{name:12}" + "".join(f"{cost:10.2f}" for cost in costs.values()))
    report("switch-interval", result, given.save)


if __name__ == "__main__":
    main()
