"""Define the task of both sides of ``benchmarks.gpu.peers``, and their output lines; no torch."""

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.gpu.bench import Bench, rounded

LOT, EQUAL = "lot", "equal"
"""Completions that end by lot, and completions that are all of the same length."""
IMPOSSIBLE = -1.0
"""In the place of the end token's bias: nothing ends by itself."""


@dataclass(frozen=True)
class Task:
    """GRPO on a made model: both sides have the same batches, precision and share of the card.

    Args:
        shape: one of ``recipes.math.make_model.SHAPES``.
        lora: train adapters of rank 16 on all linear layers; else all weights.
        iterations: on completions that end by lot, of which the first warms up.
        equal_iterations: thereafter on completions of ``mean`` tokens each.
        mean: tokens of a completion.
        longest: tokens of a completion at most.
        groups: prompts of an iteration.
        group_size: completions of a prompt.
        max_model_len: prompt and completion.
        share: of the card that vLLM may take.
        max_tokens_per_micro_batch: of ours; None: as the library has it.
        trl: TRL's settings that are not its defaults.
    """

    shape: str
    lora: bool = False
    iterations: int = 3
    equal_iterations: int = 2
    mean: int = 256
    longest: int = 1024
    groups: int = 32
    group_size: int = 8
    max_model_len: int = 2048
    share: float = 0.3
    max_tokens_per_micro_batch: int | None = None
    trl: Mapping[str, Any] = field(default_factory=dict)

    def on(self, bench: Bench) -> "Task":
        """Return the same task, for a trial on a CPU at a tiny size."""
        if not bench.tiny:
            return self
        return replace(self, mean=4, longest=12, groups=2, group_size=2)

    def directory(self, bench: Bench) -> Path:
        """Return where the model and its prompts are made."""
        return bench.scratch / "peers" / self.shape


def lot(completion: str) -> float:
    """Return a reward that nothing can learn, and that is the same on both sides."""
    return float(zlib.crc32(completion.encode()) & 1)


def process_seconds() -> float:
    """Return the seconds since this process was started, interpreter included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- lines


def lines_of(scratch: Path, side: str) -> Path:
    """Return the file to which a side appends a line of JSON as soon as it knows something."""
    return scratch / f"{side.replace('/', '-')}.lines"


class Lines:
    """Appends lines to a side's file, each at once."""

    def __init__(self, bench: Bench, side: str) -> None:
        self._path, self._side = lines_of(bench.scratch, side), side

    def tell(self, **figures: Any) -> None:
        """Tell figures, with floats rounded to four digits."""
        line = {"side": self._side} | {name: rounded(value) for name, value in figures.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def following(path: Path, tell: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Tell each line that another process appends to a file, while the block runs."""
    over = Event()
    path.write_text("")  # of an earlier run in the same place

    def follow() -> None:
        with path.open() as file:
            begun = ""
            while True:
                last = over.wait(0.1)
                begun += file.read()
                *whole, begun = begun.split("\n")
                for line in whole:
                    tell(json.loads(line))
                if last:
                    return

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
