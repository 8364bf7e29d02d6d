"""Pictures of recorded rollouts: each is stored once, in a file named by its digest."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_rl.errors import DataError
from lightning_rl.rollout import Picture, Rollout

Record = dict[str, Any]
FOLDER = "pictures"
_DIGEST = re.compile("[0-9a-f]{64}")
_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


class PictureFolder:
    """The folder ``pictures/`` beside a file of rollouts, with a file per picture, named by its
    SHA-256.

    Rollout files in one folder share it. A picture that was read or written is not checked again.

    Args:
        file: the file of rollouts. Pictures of an SQLite database in memory (``:memory:``) stay
            there.
    """

    def __init__(self, file: str | Path) -> None:
        self._on_disk = str(file) != ":memory:"
        self.path = Path(file).parent / FOLDER
        self._known: dict[str, bytes] = {}
        self._written: set[str] = set()

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """Store the rollouts' pictures; call this before the rollouts are written, which refer to
        them.

        Raises:
            DiskError: if one cannot be written.
        """
        for picture in pictures_in(rollouts):
            if not self._on_disk:
                self._known[picture.digest] = picture.data
            elif picture.digest not in self._written:
                self._write(picture)
                self._written.add(picture.digest)

    def _write(self, picture: Picture) -> None:
        from lightning_rl.run.files.rundir import (
            refused,  # with Lightning, which readers do without
        )

        file = self.path / f"{picture.digest}{ending_of(picture.data)}"
        if file.exists():
            return
        # Of this process alone: ranks write the same pictures at the same time.
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as part:
                part.write(picture.data)
                part.flush()
                os.fsync(part.fileno())
            partial.replace(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise refused(file, error) from error

    def file_of(self, digest: str) -> Path | None:
        """Return the path of a picture; None if it is missing."""
        if not _DIGEST.fullmatch(digest):  # it comes from a file, maybe a stranger's
            return None
        return next((f for f in self.path.glob(f"{digest}.*") if f.suffix != ".partial"), None)

    def fill(self, where: str, record: Any) -> Any:
        """Return the record of a rollout with the bytes of its pictures.

        Raises:
            DataError: naming the location, if a picture is missing or was changed.
        """
        return _with_data(record, lambda told: self._read(where, str(told.get("digest"))))

    def _read(self, where: str, digest: str) -> bytes:
        if digest in self._known:
            return self._known[digest]
        file = self.file_of(digest)
        if file is None:
            raise DataError(
                f"{where}: picture {digest[:12]!r} is not in {self.path}; copy that folder "
                "together with the file"
            )
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"{where}: {file} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataError(f"{where}: {file} was changed: its digest does not match; restore it")
        self._known[digest] = data
        return data


def without_data(record: Any) -> Any:
    """Return the record of a rollout with empty pictures."""
    return _with_data(record, lambda told: b"")


def _with_data(record: Any, data_of: Any) -> Any:
    """Return a record whose pictures have data; malformed values stay, to be refused later."""
    if not isinstance(record, dict):
        return record
    changed, rows = dict(record), record.get("rows")
    changed["prompt"] = _holder(record.get("prompt"), data_of)
    if isinstance(rows, list):
        changed["rows"] = [_holder(row, data_of) for row in rows]
    return changed


def _holder(held: Any, data_of: Any) -> Any:
    told = held.get("pictures") if isinstance(held, Mapping) else None
    if not isinstance(told, list) or not told:
        return held
    pictures = [
        one | {"data": data_of(one)} if isinstance(one, dict) and "data" not in one else one
        for one in told
    ]
    return {**held, "pictures": pictures}


def told(pictures: Sequence[Picture]) -> list[Record]:
    """Return pictures as records refer to them."""
    return [{"digest": p.digest, "width": p.width, "height": p.height} for p in pictures]


def pictures_in(rollouts: Iterable[Rollout]) -> Iterator[Picture]:
    """Yield the pictures of rollouts, each once."""
    seen: set[str] = set()
    for rollout in rollouts:
        held = chain(rollout.prompt.pictures, *(row.pictures for row in rollout.rows))
        for picture in held:
            if picture.digest not in seen:
                seen.add(picture.digest)
                yield picture


def ending_of(data: bytes) -> str:
    """Return the usual file ending for these bytes."""
    return next((end for begin, end in _ENDINGS.items() if data.startswith(begin)), ".img")
