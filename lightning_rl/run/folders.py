"""Folders that are whole or as they were, and links that point to something at all times."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rl.run.rundir import sync_directory


def cache_folder() -> Path:
    """Of the user, for what this library keeps for later runs; it need not be there."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "lightning_rl"


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Fill a folder that takes the place of ``target`` once all of it is on the disk.

    If the block raises, or the process is killed, what was there stays: in its place, or for an
    instant beside it, as :func:`before_of`.

    Raises:
        OSError: if the disk refuses.
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
    """Give a folder that is whole its name; what has the name goes when the new one is there."""
    before = before_of(target)
    remove(before)
    if target.exists():
        target.rename(before)
    partial.rename(target)
    sync_directory(target.parent)
    remove(before)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there; of a link, not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def before_of(target: Path) -> Path:
    """Where the old folder is while the new one takes its place."""
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
    """Point ``link`` to what is beside it, at no time to nothing."""
    partial = link.with_name(f"{link.name}.partial")
    partial.unlink(missing_ok=True)
    os.symlink(target, partial)
    partial.replace(link)
