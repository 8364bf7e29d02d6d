"""Rollouts as JSON lines: one object per rollout, which any tool can read."""

import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.files import (
    Record,
    Recorded,
    RolloutFile,
    as_json,
    as_record,
    as_rollout,
    require_plain_file,
)
from lightning_rl.data.rollouts.pictures import without_data
from lightning_rl.data.rollouts.validation import checked
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout

_START, _LAST = b'{"left": ', b'{"left": 0,'


class JSONLRollouts(RolloutFile):
    """A file whose lines hold ``iteration``, ``id`` and the fields of :class:`Rollout`.

    Lines that :meth:`append` writes begin with ``left``, the number of lines that follow in the
    same batch. So what a killed process left behind, half a line or half a batch, is what follows
    the last ``"left": 0``.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._end: int | None = None  # of what we have written

    def append(
        self, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
    ) -> None:
        records: list[Record] = [
            {"left": left, "iteration": iteration} | as_record(rollout)
            for left, rollout in zip(reversed(range(len(rollouts))), rollouts, strict=True)
        ]
        if records:
            records[-1]["progress"] = progress
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.pictures.write(rollouts)
        size = self.path.stat().st_size if self.path.exists() else 0
        if self._end not in (None, size):
            raise DataError(
                f"{self.path} is {size} bytes long, but this process left it at {self._end}: "
                "another process writes to it; give each run its own file"
            )
        self._end = self.write(records)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def write(self, records: Iterable[Record]) -> int:
        """Append a line per record; returns the file's length in bytes.

        Raises:
            DiskError: if they cannot be written; the file is unchanged then.
        """
        from lightning_rl.run.files.rundir import append  # with Lightning, which readers do without

        return append(self.path, as_lines(records))

    def truncate(self, end: int) -> None:
        """Remove what was written after ``end``, a position from a checkpoint."""
        if self.path.exists() and self.path.stat().st_size > end:
            os.truncate(self.path, end)

    def recover(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        progress, kept, position = None, 0, 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                position += len(line)
                if not (line.startswith(_START) or _START.startswith(line)):
                    raise DataError(
                        f"{self.path}:{number} was not written by `lightning-rl rollout`, which "
                        "cannot append after it; use another file"
                    )
                if line.startswith(_LAST) and line.endswith(b"\n"):
                    progress, kept = parsed(f"{self.path}:{number}", line).get("progress"), position
        self.truncate(kept)
        self._end = kept
        return self._continuable(progress, kept > 0)

    def read(self) -> Iterator[Recorded]:
        self.require_existing()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{self.path}:{number}"
                if not line.strip():
                    continue
                if not line.endswith(b"\n") and not _is_json(line):
                    warnings.warn(
                        f"{where}: the last line is cut off and ignored; run the command that "
                        "wrote it again to resume",
                        stacklevel=2,
                    )
                    return
                record = parsed(where, line)
                rollout = as_rollout(where, record, self.pictures)
                yield Recorded(where, record.get("iteration", 0), rollout)

    def tail(self, count: int) -> tuple[list[Record], int]:
        last: deque[tuple[int, bytes]] = deque(maxlen=count)
        total = 0
        for total, numbered in enumerate(whole_lines(self.path), 1):  # noqa: B007
            last.append(numbered)
        return [record_of(f"{self.path}:{number}", line) for number, line in last], total


def as_lines(records: Iterable[Record]) -> str:
    """Return a line of JSON per record."""
    return "".join(_one_line(as_json(record)) + "\n" for record in records)


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines that hold an object; all but a last one without its end are found by
    their braces, without parsing.

    Raises:
        DataError: naming a line that holds none, except a last one that was cut off.
    """
    require_plain_file(path)
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            ended = line.endswith(b"\n") or _is_json(line)  # half a line may end in a brace too
            if ended and line.startswith(b"{") and line.rstrip().endswith(b"}"):
                yield number, line
            elif line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: not a JSON object: {_beginning(line)}")


def parsed(where: str, line: bytes) -> Record:
    """Return the object of a line.

    Raises:
        DataError: naming the location, if it holds none.
    """
    try:
        record = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: damaged, not UTF-8 text ({error.reason}); restore the file"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: damaged, nested too deeply; restore the file") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: damaged, not JSON from column {error.colno} on: {_beginning(line)}; "
            "remove the line, or restore the file"
        ) from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: damaged ({error}); restore the file") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a rollout as a JSON object, got {_beginning(line)}")
    return record


def record_of(where: str, line: bytes) -> Record:
    """Return the record of a line for viewers; without an id, its line number is its id.

    Raises:
        DataError: naming the location, ``file:12``, if the line is not a rollout.
    """
    record = checked(where, without_data(parsed(where, line)))
    return {"id": where.rpartition(":")[2]} | record


def _one_line(text: str) -> str:
    """Escape the further characters that Python and many editors take for line ends."""
    for character in ("\x85", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _beginning(line: bytes) -> str:
    return repr(line.decode("utf-8", errors="replace").strip()[:60])
