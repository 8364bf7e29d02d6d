"""Files that another process still writes, each read from where reading ended."""

from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from lightning_rl.data.rollouts.files import Record, open_rollouts, require_plain_file
from lightning_rl.errors import DataError


class GrowingFile:
    """A file of JSON lines that grows. A line is read when it is whole.

    Args:
        path: the file, which need not exist yet.
        parse: returns the record of a place, ``file:12``, and its line. If it raises a DataError,
            the line is left out, and ``problem`` says so.
    """

    def __init__(self, path: Path, parse: Callable[[str, bytes], Record]) -> None:
        self.path = path
        self._parse = parse
        self.restart()

    def restart(self) -> None:
        """Read from the file's start next."""
        self.count = 0
        """Lines so far."""
        self._end, self._last_line = 0, b""
        self._damage, self._damaged = "", 0

    @property
    def problem(self) -> str:
        """What is wrong with the first damaged line; empty if none is."""
        more = self._damaged - 1
        return self._damage + (f" (and {more} more)" if more > 0 else "")

    def read(self, most: int | None = None) -> tuple[bool, list[Record]]:
        """Return whether the file was rewritten, and the new records, at most the last ``most``.

        If it was rewritten, all its records are new: a resumed run cuts what its checkpoint does
        not know, and another file may have taken the place.
        """
        require_plain_file(self.path)
        if not self.path.exists():
            return False, []
        lines: deque[tuple[str, bytes]] = deque(maxlen=most)
        with self.path.open("rb") as file:
            rewritten = not self._goes_on(file)
            if rewritten:
                self.restart()
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the rest is not written yet
                self.count += 1
                self._end += len(line)
                self._last_line = line
                lines.append((f"{self.path}:{self.count}", line))
        return rewritten, [record for where, line in lines for record in self._parsed(where, line)]

    def _goes_on(self, file: BinaryIO) -> bool:
        """Return True if the last line read is still there; a file may be cut, and grow again."""
        file.seek(self._end - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _parsed(self, where: str, line: bytes) -> list[Record]:
        try:
            return [self._parse(where, line)]
        except DataError as error:
            self._damage = self._damage or str(error)
            self._damaged += 1
            return []


class RereadFile:
    """A rollout file of another format, read as a whole whenever it changed."""

    problem = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        """Read it next, changed or not."""
        self.count = 0
        self._stamps: list[tuple[int, int] | None] = []

    def read(self, most: int) -> tuple[bool, list[Record]]:
        """Return whether it changed, and then its last records."""
        # A store has a log beside it, and a Parquet file may be a folder.
        files = [self.path, self.path.with_name(f"{self.path.name}-wal"), *self.path.glob("*")]
        stamps = [stamp_of(file) for file in files]
        if stamps == self._stamps:
            return False, []
        with closing(open_rollouts(self.path)) as file:
            records, self.count = file.tail(most)
        self._stamps = stamps
        return True, records


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return when a file was changed, in ns, and its size, which change with its content."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
