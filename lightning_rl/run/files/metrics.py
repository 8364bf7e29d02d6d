"""A run's rows of metrics, in memory and in a file; a checkpoint stores only a position in it.

A checkpoint with all rows would grow with every iteration. Their position and checksum are enough
to drop the rows that a killed run wrote after it.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_rl.run.files.rundir import append, run_dir, write_whole
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.processes.dist import all_sum


class Sums:
    """Sums and counts by name; means do not depend on how items were cut into batches or ranks."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor | float]], share: Tensor) -> None:
        """Add a sum and the count that it is divided by for each name; all ranks know the names.

        Both are multiplied by ``share``: 0 for what stands in for nothing, else 1.
        """
        for name, (total, count) in sums.items():
            pair = torch.stack([total.detach().double(), torch.as_tensor(count).to(total).double()])
            pair = torch.where(share > 0, pair, 0.0)
            known = self._pairs.get(name)
            self._pairs[name] = pair if known is None else known + pair

    def means(self) -> dict[str, float]:
        """Return the means over everything added on every rank, and forget it."""
        pairs, self._pairs = self._pairs, {}
        totals = all_sum(torch.stack(list(pairs.values()))).tolist()
        return {
            name: total / (count or 1.0) for name, (total, count) in zip(pairs, totals, strict=True)
        }


def summarize(values: list[float]) -> tuple[float, float]:
    """Return mean and (biased) standard deviation; nan for an empty list."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


Row = dict[str, float]


class MetricsLog:
    """``metrics.jsonl`` in the run directory, and its rows since the run began.

    A new run in the same directory appends to the file. A resumed run keeps the rows up to its
    checkpoint; in another directory, they are copied there.
    """

    NAME = "metrics.jsonl"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._file: Path | None = None
        self._begin = self._end = 0  # of this run's lines, in bytes
        self._checksum = 0
        self._pending = ""  # lines that a full disk refused
        self._state: dict[str, Any] | None = None

    def begin(self, trainer: Trainer) -> None:
        """Begin a run's rows. Call it in ``setup``, on every rank."""
        self._file = run_dir(trainer) / self.NAME
        self._begin = self._end = self._file.stat().st_size if self._file.exists() else 0
        self._checksum = 0

    def go_on(self, trainer: Trainer) -> None:
        """Drop rows after the checkpoint, if there is one. Call it in ``on_train_start``."""
        state, self._state = self._state, None
        if state is None or not trainer.is_global_zero:
            return
        file = self._path()
        source = next((f for f in _candidates(file, trainer, state) if _holds(f, state)), None)
        if source == file:
            self._begin = state["begin"]
            os.truncate(file, state["end"])
            self._end, self._checksum = state["end"], state["checksum"]
            self.rows = read_rows(_part(file, state).decode())
        elif source is not None:
            text = _part(source, state).decode()
            self._end, self._checksum = append(file, text), state["checksum"]
            self.rows = read_rows(text)
        elif state["end"] > state["begin"]:
            self._save_what_is_left(file, state)
        elif Path(state["file"]) == file.absolute() and self._end > state["end"]:
            os.truncate(file, state["end"])  # saved before the first row
            self._begin = self._end = state["end"]
        self._pending = state["pending"]
        self.rows += read_rows(self._pending)
        self._flush()

    def add(self, trainer: Trainer, row: Row) -> None:
        """Append a row; if it has the same iteration as the last one, they are merged.

        Raises:
            DiskError: if it cannot be written; the file is then unchanged.
        """
        if self.rows and self.rows[-1]["iteration"] == row["iteration"]:
            row = self.rows.pop() | row  # a resumed run syncs, and may evaluate, once more
        self.rows.append(row)
        if trainer.is_global_zero:
            self._pending += _lines([row])
            self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the rows as primitives, after syncing the file to disk."""
        file = self._path()
        if self._end > self._begin and file.is_file():
            with file.open("rb") as lines:
                os.fsync(lines.fileno())
        return {
            "file": str(file.absolute()),
            "begin": self._begin,
            "end": self._end,
            "checksum": self._checksum,
            "iteration": self.rows[-1]["iteration"] if self.rows else -1,
            "pending": self._pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state's position when training starts."""
        self._state = state

    def _flush(self) -> None:
        if self._pending:
            self._end = append(self._path(), self._pending)
            self._checksum = zlib.crc32(self._pending.encode(), self._checksum)
            self._pending = ""

    def _path(self) -> Path:
        assert self._file is not None, "call begin() first"
        return self._file

    def _save_what_is_left(self, file: Path, state: dict[str, Any]) -> None:
        rows = []
        if Path(state["file"]) == file.absolute() and file.exists():
            text = file.read_text(encoding="utf-8", errors="replace")
            rows = [row for row in read_rows(text) if row["iteration"] <= state["iteration"]]
            kept, self._begin = _lines(rows), 0
            write_whole(file, kept)
            self._end, self._checksum = len(kept.encode()), zlib.crc32(kept.encode())
        self.rows = rows
        rank_zero_warn(
            f"{state['file']} has changed since the checkpoint was saved; continuing "
            f"with the {len(rows)} rows of metrics that remain"
        )


def read_rows(text: str) -> list[Row]:
    """Read rows by iteration; the later of two is kept, and invalid lines are skipped.

    What ``dumps`` wrote as null is NaN.
    """
    rows: dict[float, Row] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
            iteration = row["iteration"] + 0  # a number, or a TypeError
            row = {name: math.nan if number is None else number for name, number in row.items()}
            rows[iteration] = rows.get(iteration, {}) | row
        except (ValueError, TypeError, KeyError):
            continue  # the end of a line that a kill cut off, or a damaged one
    return [rows[iteration] for iteration in sorted(rows)]


def _lines(rows: list[Row]) -> str:
    return "".join(dumps(row) + "\n" for row in rows)


def _candidates(file: Path, trainer: Trainer, state: dict[str, Any]) -> list[Path]:
    """List where the file may be: here, in the checkpoint's run, and where it was when saved."""
    checkpoint = Path(str(trainer.ckpt_path))
    return [file, checkpoint.absolute().parent.parent / file.name, Path(state["file"])]


def _holds(file: Path, state: dict[str, Any]) -> bool:
    whole = file.exists() and file.stat().st_size >= state["end"] > state["begin"]
    return whole and zlib.crc32(_part(file, state)) == state["checksum"]


def _part(file: Path, state: dict[str, Any]) -> bytes:
    with file.open("rb") as lines:
        lines.seek(state["begin"])
        return lines.read(state["end"] - state["begin"])


def named(metric: str, learner: str) -> str:
    """Return a metric's name for one of several learners, such as ``policy/a/loss``."""
    return metric.replace("/", f"/{learner}/", 1)
