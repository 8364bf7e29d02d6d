"""The ledger of a run: its start and what each iteration did, as a hash chain."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_rl.errors import DataError
from lightning_rl.run.files.rundir import append, refused

Entry = dict[str, Any]
FILE = "ledger.jsonl"
_START = "0" * 64
"""The ``previous`` hash of the first entry."""


class Ledger:
    """The file ``ledger.jsonl`` of a run directory: one entry per line, append-only.

    ``hash`` is the SHA-256 of the entry without it, as JSON with sorted keys and no spaces;
    ``previous`` is the hash of the line before. So with the last hash, the head, one can tell
    whether any line was changed, removed, added or moved.

    ``kind`` is ``begin`` (a run begins, or is resumed from ``version``), ``iteration``, ``metrics``
    (a further row of an iteration), ``checkpoint`` (one was saved or removed) or ``end``.
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
        """Append an entry; an incomplete last line of a killed process is removed first.

        Raises:
            DiskError: if it cannot be written; the file is unchanged then.
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
        """Yield each complete line's number and entry; None for a line that is not an entry."""
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield number, entry if isinstance(entry, dict) else None

    def entries(self) -> list[Entry]:
        """Return all entries, checking that every hash is right and each follows the one before.

        Raises:
            DataError: naming the first line that was changed, removed, added or moved.
        """
        result: list[Entry] = []
        previous = _START
        for number, entry in self.lines():
            if entry is None:
                raise DataError(f"{self.path}:{number} is not an entry: it was changed or damaged")
            if entry.get("hash") != hash_of(entry):
                raise DataError(f"{self.path}:{number} was changed: its hash does not match")
            if entry.get("previous") != previous:
                raise DataError(
                    f"{self.path}:{number} does not follow the line before: lines were removed, "
                    "added or moved"
                )
            if (what := _malformed(entry, bool(result))) is not None:
                raise DataError(f"{self.path}:{number} is not an entry that a run writes: {what}")
            previous = entry["hash"]
            result.append(entry)
        return result


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "begin": {"version": int, "weights": str, "configuration": dict, "environment": dict},
    "iteration": {
        "version": int,
        "rollouts": dict,
        "weights_before": str,
        "weights_after": str,
        "metrics": str,
    },
    "metrics": {"version": int, "metrics": str},
    "checkpoint": {"file": str, "sha256": (str, type(None))},
    "end": {"version": int, "files": dict, "folders": list},
}


def _malformed(entry: Entry, begun: bool) -> str | None:
    """Return what is wrong with an entry, or None; later releases may add fields."""
    kind = entry.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"it is of kind {kind!r:.40}"
    if not begun and kind != "begin":
        return f"the first is of kind {kind!r}; a ledger starts with 'begin'"
    for name, types in fields.items():
        value = entry.get(name)
        if not isinstance(value, types) or isinstance(value, bool):
            return f"{name} of {kind!r} is {value!r:.40}"
    for name in ("configuration", "rollouts"):
        if not all(isinstance(digest, str) for digest in entry.get(name, {}).values()):
            return f"{name} of {kind!r} are not digests"
    files = entry.get("files", {})
    if not isinstance(files, dict) or not all(map(_is_seal, files.values())):
        return f"files of {kind!r} are not digests"
    return None


def _is_seal(seal: Any) -> bool:
    return (
        isinstance(seal, dict)
        and type(seal.get("bytes")) is int
        and seal["bytes"] >= 0
        and isinstance(seal.get("sha256"), str)
    )


def hash_of(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry, without its ``hash``."""
    return digest_of_json({name: value for name, value in entry.items() if name != "hash"})


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
