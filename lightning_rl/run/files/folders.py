"""Folders that are replaced atomically, and links that always point to something."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rl.run.files.rundir import sync_directory


def cache_folder() -> Path:
    """Return the user's cache folder for this library; it may not exist."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "lightning_rl"


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Fill a folder that replaces ``target`` once all of it is on disk.

    If the block raises, or the process is killed, the old folder stays: in its place, or for an
    instant at :func:`before_of`.

    Raises:
        OSError: if it cannot be written.
    """
    partial, before = target.with_name(f"{target.name}.partial"), before_of(target)
    remove(partial)  # of a process that was killed
    if before.exists() and not target.exists():
        before.rename(target)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
        put_in_place(partial, target)
    except BaseException:
        remove(partial)
        raise


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a complete folder to ``target``, then remove the old one."""
    before = before_of(target)
    remove(before)
    if target.exists():
        target.rename(before)
    partial.rename(target)
    sync_directory(target.parent)
    remove(before)


def remove(path: Path) -> None:
    """Remove a file, link or folder if it exists; a link's target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def before_of(target: Path) -> Path:
    """Return the path of the old folder while the new one takes its place."""
    return target.with_name(f"{target.name}.before")


def _sync(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for file in files:
            descriptor = os.open(Path(place) / file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(place))


def link_to(link: Path, target: str) -> None:
    """Point ``link`` to a name in its own folder, without a moment in which it is missing."""
    partial = link.with_name(f"{link.name}.partial")
    partial.unlink(missing_ok=True)
    os.symlink(target, partial)
    partial.replace(link)
