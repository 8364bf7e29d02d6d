"""Tables of rows: in memory, or on disk and read row by row."""

import codecs
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.data.prompt_pictures import as_stored
from lightning_rl.errors import DataError
from lightning_rl.rollout import own

_PART = 2**24
"""Bytes of a file that are scanned at a time."""
_MARKS = {codecs.BOM_UTF8: "UTF-8", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_ROWS = 100
"""Number of rows with pictures that are read at a time."""


class Table(ABC):
    """Rows by number, as they are in the data."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def where(self, index: int) -> str:
        """Return the location of a row, for an error message."""

    def cache(self) -> "Cache | None":
        """Return the cache of results about the rows; None if there is none."""
        return None


class ListTable(Table):
    """Rows in memory, each with its location; reading one returns a copy."""

    def __init__(self, rows: Iterable[tuple[str, Any]]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return own(self._rows[index][1])

    def where(self, index: int) -> str:
        return self._rows[index][0]


class JSONLTable(Table):
    """The lines of a file, one JSON object each, read on access.

    Only the offsets of lines are in memory. A file that changed since it was opened is refused.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._absolute = os.path.abspath(path)  # a run may change its directory
        self._starts = array("q")
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._stamp = _stamp(self._file)
        offset = 0
        with open(self._file, "rb", closefd=False) as lines:
            for line in lines:
                # Blank as text is: some blank characters are no ASCII.
                if line.decode("utf-8", "replace").strip():
                    self._starts.append(offset)
                offset += len(line)

    def __reduce__(self) -> tuple[Any, ...]:  # an open file cannot be sent to another process
        return JSONLTable, (self._absolute,)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        if _stamp(self._file) != self._stamp:
            raise DataError(
                f"{self._path} changed while it was being read; start the run again, and write "
                "new data to a new file"
            )
        start = self._starts[index]
        stop = self._starts[index + 1] if index + 1 < len(self) else self._stamp[0]
        # Not by a seek: processes that were forked share the file's place.
        return self._parsed(index, os.pread(self._file, stop - start, start))

    def where(self, index: int) -> str:
        stop = self._starts[index]
        parts = (
            os.pread(self._file, min(_PART, stop - offset), offset)
            for offset in range(0, stop, _PART)
        )
        return f"{self._path}:{sum(part.count(10) for part in parts) + 1}"

    def cache(self) -> "Cache | None":
        path = Path(self._absolute)
        return Cache(path.parent, path.name, self._stamp)

    def _parsed(self, index: int, raw: bytes) -> Any:
        if kind := next((kind for mark, kind in _MARKS.items() if raw.startswith(mark)), None):
            raise DataError(
                f"{self.where(index)}: the file begins with the byte order mark (BOM) of {kind}, "
                "as Windows programs write it; save it as UTF-8 without a BOM"
            )
        try:
            line = raw.partition(b"\n")[0].decode("utf-8")
            return json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: expected UTF-8 text ({error})") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.where(index)}: expected one JSON object per line, found {error.msg} at "
                f"column {error.colno}: {line.strip()!r:.80}"
            ) from error


class DatasetTable(Table):
    """A 🤗 ``Dataset``, whose Arrow files are memory-mapped; pictures are not decoded."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self._stored = as_stored(dataset.features)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if self._stored is None:
            return self._dataset[index]
        return self._read(self._dataset.with_format("arrow")[index])[0]

    def __iter__(self) -> Iterator[Any]:
        if self._stored is None:
            return iter(self._dataset)
        parts = self._dataset.with_format("arrow").iter(_ROWS)
        return (row for part in parts for row in self._read(part))

    def _read(self, part: Any) -> list[Any]:
        return [self._stored.decode_example(row) for row in part.to_pylist()]

    def where(self, index: int) -> str:
        return f"{self._name}: row {index}"

    def cache(self) -> "Cache | None":
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        if not files:
            return None
        stamps = [[path.name, *_stamp(path)] for path in files]
        return Cache(files[0].parent, files[0].stem, (self._dataset._fingerprint, *stamps))


def _stamp(file: int | Path) -> tuple[int, int]:
    """Return a file's size and modification time, which change when it does."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


class Cache:
    """Arrays of results about the rows of a table, in files beside it that are computed once.

    Args:
        folder: the folder of the data.
        name: the name of the data in it.
        stamp: primitives that identify these rows.
    """

    def __init__(self, folder: Path, name: str, stamp: Any) -> None:
        self._place = folder / ".cache" / "lightning_rl" / name
        self._stamp = stamp

    def array(self, key: Any, make: Any) -> np.ndarray:
        """Return the array that ``make`` returned when this key was first used, memory-mapped.

        Of several processes one computes it, and the others wait.
        """
        digest = blake2b(json.dumps([self._stamp, key]).encode(), digest_size=8).hexdigest()
        path = self._place.with_name(f"{self._place.name}-{digest}.npy")
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(f"{path}.lock")
                lock.acquire()
            except OSError as error:
                rank_zero_warn(
                    f"{path.parent} cannot be written ({error.strerror}), so results about the "
                    "rows are computed again by each load; make it writable"
                )
                return make()
            try:
                if not path.exists():
                    self._write(path, make())
            finally:
                lock.release()
        return np.load(path, mmap_mode="r")

    @staticmethod
    def _write(path: Path, made: np.ndarray) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, made)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
