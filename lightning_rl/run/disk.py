"""Files that are whole or as they were, also when the disk is full or the power fails."""

import os
import shutil
from pathlib import Path

from lightning_rl.errors import ConfigError, DiskError


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on the disk: a file's new name is safe only with its directory.

    Raises:
        OSError: if the disk refuses.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> int:
    """Append all of ``text``, or nothing; returns the file's length in bytes.

    Raises:
        DiskError: if it cannot be written; the file is as it was.
    """
    # JSON's own escape for half a character, which UTF-8 cannot hold.
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            before = length = os.fstat(descriptor).st_size
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
                length = os.fstat(descriptor).st_size
            except OSError:
                if os.fstat(descriptor).st_size > before:  # a part of it was written
                    os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refused(path, error) from error
    return length


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content; what was there stays until all of the new one is on the disk.

    Raises:
        DiskError: if it cannot be written; the file is as it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise refused(path, error) from error


def require_writable(directory: Path, key: str) -> None:
    """Check that a directory can be written, or made, before anything is begun.

    Raises:
        ConfigError: naming the key, and what stands in the way.
    """
    there = directory.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is a file, where a directory should be; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key}: {there} cannot be written (read-only, or of another user); name another "
            "directory, or change its rights"
        )


def refused(path: Path, error: OSError) -> DiskError:
    """What the operating system said, and how much room there is."""
    return DiskError(
        f"{path} could not be written: {error.strerror or error} ({free_space(path)}); what was "
        "there before is intact. Make room, or write elsewhere (trainer.logger, "
        "trainer.default_root_dir), and go on from the last checkpoint"
    )


def free_space(path: Path) -> str:
    """Of the disk that a file is on, or would be."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB free"
