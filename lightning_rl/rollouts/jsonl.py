"""Rollouts as JSON lines: one object per rollout, readable by everything."""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.files import Recorded, RolloutFile, as_record, as_rollout

_START, _LAST = b'{"left": ', b'{"left": 0,'


class JSONLRollouts(RolloutFile):
    """A line holds ``iteration``, ``id`` and the fields of :class:`Rollout`.

    It begins with ``left``, the number of lines that its batch still needs. So what a killed
    process left behind, half a line or half a batch, is what follows the last ``"left": 0``.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._end: int | None = None  # of what we have written

    def append(
        self, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
    ) -> None:
        lines = []
        for left, rollout in zip(reversed(range(len(rollouts))), rollouts, strict=True):
            record = {"left": left, "iteration": iteration, "id": rollout.id} | as_record(rollout)
            if left == 0:
                record["progress"] = progress
            lines.append(_one_line(json.dumps(record, ensure_ascii=False, default=str)) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if self._end not in (None, file.tell()):
                raise DataError(
                    f"{self.path} is {file.tell()} bytes long, but we left it at {self._end}: "
                    "another process writes to it; give each run a file of its own"
                )
            file.write("".join(lines).encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()

    def recover(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        progress, kept, position = None, 0, 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                position += len(line)
                if not (line.startswith(_START) or _START.startswith(line)):
                    raise DataError(
                        f"{self.path}:{number} is not a line of `lightning-rl rollout`, which "
                        "cannot go on after it; name another file"
                    )
                if line.startswith(_LAST) and line.endswith(b"\n"):
                    progress, kept = self._parse(number, line).get("progress"), position
        os.truncate(self.path, kept)
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
                        f"{where}: the last line is cut off, and left out; run the command that "
                        "wrote it again, and it goes on where it stopped",
                        stacklevel=2,
                    )
                    return
                record = self._parse(number, line)
                yield Recorded(where, record.get("iteration", 0), as_rollout(where, record))

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        where = f"{self.path}:{number}"
        try:
            record = json.loads(line.rstrip())
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: damaged, not UTF-8 text ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: damaged, not JSON from column {error.colno} on: {_beginning(line)}; "
                "remove the line, or restore the file"
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a rollout, an object, got {_beginning(line)}")
        return record


def _one_line(text: str) -> str:
    """Escape what Python, and many an editor, takes for the end of a line too."""
    for character in ("\x85", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _beginning(line: bytes) -> str:
    return repr(line.decode("utf-8", errors="replace").strip()[:60])
