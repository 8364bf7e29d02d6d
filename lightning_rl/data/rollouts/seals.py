"""Digests of the result files in a run directory, which no iteration is trained on."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts import ledger
from lightning_rl.data.rollouts.files import VIEW

_GROWS = ".jsonl"
_TAIL = 4096

Seal = dict[str, Any]
"""A file's size in ``bytes`` and ``sha256`` at one time; bytes appended later are not covered."""


def result_files(run: Path) -> dict[str, Path]:
    """Return the files directly in a run directory that hold results, by name."""
    return {
        file.name: file
        for file in sorted(run.iterdir())
        if file.is_file()
        and file.suffix not in (".ckpt", ".partial")
        and file.name not in (ledger.FILE, VIEW)
        and not (file.name.startswith("config") and file.suffix == ".yaml")
    }


def folders_in(run: Path) -> list[str]:
    """Return the names of the folders directly in a run directory."""
    return sorted(folder.name for folder in run.iterdir() if folder.is_dir())


def seal_of(file: Path, size: int | None = None) -> Seal | None:
    """Return the seal of a file's first ``size`` bytes, or of all; None if it has fewer."""
    grown = _Grown()
    grown.read(file, size)
    return grown.seal() if size is None or grown.size == size else None


@dataclass
class _Grown:
    """The digest of what has been read of a growing file."""

    size: int = 0
    tail: bytes = b""
    digest: Any = field(default_factory=hashlib.sha256)

    def follows(self, file: Path) -> bool:
        """Return whether the file still begins with it; after a resume it may not."""
        with file.open("rb") as stream:
            stream.seek(self.size - len(self.tail))
            return stream.read(len(self.tail)) == self.tail

    def read(self, file: Path, size: int | None = None) -> None:
        """Read further, up to ``size`` bytes in all."""
        with file.open("rb") as stream:
            stream.seek(self.size)
            while block := stream.read(1 << 20 if size is None else min(1 << 20, size - self.size)):
                self.digest.update(block)
                self.size += len(block)
                self.tail = (self.tail + block)[-_TAIL:]

    def seal(self) -> Seal:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


class Seals:
    """The seals of a run's results as it goes on; each is returned once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._told: dict[str, Seal] = {}
        self._grown: dict[str, _Grown] = {}

    def grown(self) -> dict[str, Seal]:
        """Return new seals of the files that are appended to, for those that have grown."""
        return self._new(
            {n: self._on(n, f) for n, f in result_files(self._run).items() if _grows(n)}
        )

    def all(self) -> dict[str, Seal]:
        """Return new seals of all files, for those that are new or changed."""
        return self._new(
            {
                name: self._on(name, file) if _grows(name) else seal_of(file) or {}
                for name, file in result_files(self._run).items()
            }
        )

    def _on(self, name: str, file: Path) -> Seal:
        grown = self._grown.get(name)
        if grown is None or not grown.follows(file):
            grown = self._grown[name] = _Grown()
        grown.read(file)
        return grown.seal()

    def _new(self, seals: dict[str, Seal]) -> dict[str, Seal]:
        new = {name: seal for name, seal in seals.items() if self._told.get(name) != seal}
        self._told |= new
        return new


def _grows(name: str) -> bool:
    return name.endswith(_GROWS)
