"""The ledger of a run: what it began with and what each iteration did, chained by hash."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_rl.errors import DataError
from lightning_rl.run.rundir import append, refused

Entry = dict[str, Any]
FILE = "ledger.jsonl"
_START = "0" * 64
"""What the first entry says of the one before it."""


class Ledger:
    """``ledger.jsonl`` of a run directory. A line is an entry; nothing is ever taken back.

    ``hash`` is the SHA-256 of the entry without it, as JSON with sorted keys and no spaces;
    ``previous``, the hash of the line before. So whoever knows the last hash, the head, knows
    whether any line was changed, removed, added or moved.

    ``kind`` is ``begin`` (a run begins, or goes on from ``version``), ``iteration`` or
    ``checkpoint``.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / FILE
        self._head: str | None = None

    @property
    def head(self) -> str:
        """The hash of the last entry.

        Raises:
            DataError: if the last line is damaged.
        """
        if self._head is None:
            self._head = _START
            for _, entry in self.lines():
                self._head = _START if entry is None else str(entry.get("hash", _START))
        return self._head

    def append(self, kind: str, **content: Any) -> None:
        """Add an entry; what a killed process wrote of its last line is removed first.

        Raises:
            DiskError: if it cannot be written; then the file is as it was.
        """
        if self._head is None:
            self._cut_last_line()
        entry = {"kind": kind, **content, "previous": self.head}
        entry["hash"] = hash_of(entry)
        append(self.path, json.dumps(entry) + "\n")
        self._head = entry["hash"]

    def _cut_last_line(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            try:
                with self.path.open("r+b") as file:
                    file.truncate(whole)
            except OSError as error:
                raise refused(self.path, error) from error

    def lines(self) -> Iterator[tuple[int, Entry | None]]:
        """Each whole line's number and entry; None for a line that holds none."""
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            yield number, entry if isinstance(entry, dict) else None

    def entries(self) -> list[Entry]:
        """All entries, if every hash is right and each follows the one before.

        Raises:
            DataError: naming the first line that was changed, removed, added or moved.
        """
        found: list[Entry] = []
        previous = _START
        for number, entry in self.lines():
            if entry is None:
                raise DataError(f"{self.path}:{number} is no entry: it was changed or damaged")
            if entry.get("hash") != hash_of(entry):
                raise DataError(f"{self.path}:{number} was changed: its hash is another")
            if entry.get("previous") != previous:
                raise DataError(
                    f"{self.path}:{number} does not follow the line before: lines were removed, "
                    "added or moved"
                )
            previous = entry["hash"]
            found.append(entry)
        return found


def hash_of(entry: Mapping[str, Any]) -> str:
    """The SHA-256 of an entry, without its ``hash``."""
    return digest_of_json({name: value for name, value in entry.items() if name != "hash"})


def digest_of_json(value: Any) -> str:
    """The SHA-256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
