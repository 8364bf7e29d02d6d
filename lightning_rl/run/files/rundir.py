"""A run's directory, which one process at a time uses, and atomic writes to the files in it.

A file holds its old or its new content, even if the disk is full or the power fails.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.errors import ConfigError, DiskError, is_url, local_path
from lightning_rl.run.hooks import is_fast_dev_run
from lightning_rl.run.processes import dist

OWN_RUNS = "lightning_rl_runs"
"""Folder in ``default_root_dir`` for runs without a directory of a logger."""

WRITE_LOCALLY = (TensorBoardLogger, CSVLogger, WandbLogger)
"""Loggers whose ``save_dir`` must be a local directory."""

_known: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_own: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_scratch: WeakKeyDictionary[Trainer, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def run_dir(trainer: Trainer) -> Path:
    """Return the directory of a run's results, and create it.

    That is the directory of the first logger, if it is a ``TensorBoardLogger`` or ``CSVLogger``,
    which begin a new one for every run. Otherwise it is ``lightning_rl_runs/version_<n>`` in
    ``default_root_dir``. For a fast dev run it is a scratch directory, which is deleted at the end.

    On several ranks it is rank 0's. All ranks have to make the first call, since it asks rank 0
    (the data modules do so first in ``setup``); any rank may make later calls.
    """
    directory = _known.get(trainer)
    if directory is None:
        directory = _choose(trainer)
        if dist.world_size() == trainer.world_size:  # else the ranks cannot talk yet
            directory = _known[trainer] = Path(trainer.strategy.broadcast(str(directory)))
            directory.mkdir(parents=True, exist_ok=True)
    return directory


def require_writable_dirs(trainer: Trainer) -> None:
    """Check the directories that a run will write to, before a logger fails with an unclear error.

    Loggers of servers may name a URL.

    Raises:
        ConfigError: naming the first directory that cannot be written.
    """
    if is_fast_dev_run(trainer):
        return
    for logger in trainer.loggers:
        writes_here = isinstance(logger, WRITE_LOCALLY)
        if logger.save_dir is not None and (writes_here or not is_url(logger.save_dir)):
            require_writable(logger.save_dir, "trainer.logger.save_dir")
    require_writable(trainer.default_root_dir, "trainer.default_root_dir")


def output_path(trainer: Trainer, given: str | Path | None, name: str) -> Path:
    """Return ``given`` if the user chose a path, else ``name`` in the run directory.

    A fast dev run leaves the user's own files alone, and uses the run directory for them too.
    """
    if given is not None and not is_fast_dev_run(trainer):
        return local_path(given, name)
    return run_dir(trainer) / name


def own_runs(trainer: Trainer) -> Path | None:
    """Return the folder of runs without a logger's directory; None if a logger has one.

    Raises:
        ConfigError: if it is not a local path.
    """
    if isinstance(trainer.logger, TensorBoardLogger | CSVLogger):
        return None
    return local_path(trainer.default_root_dir, "trainer.default_root_dir") / OWN_RUNS


def continue_in(trainer: Trainer, directory: Path) -> None:
    """Let a run continue in the directory of an earlier one, which is among ``own_runs``."""
    _own[trainer] = directory


def _choose(trainer: Trainer) -> Path:
    """Choose the run directory from this rank's point of view; rank 0 creates it."""
    if is_fast_dev_run(trainer):
        return _scratch_directory(trainer)
    runs = own_runs(trainer)
    if runs is None:
        directory = local_path(trainer.logger.log_dir, "trainer.logger.save_dir")  # type: ignore[union-attr, arg-type]
    elif trainer in _own:
        directory = _own[trainer]
    else:
        directory = _next_version(runs)
        while trainer.is_global_zero:  # another run may take the same one right now
            try:
                directory.mkdir(parents=True)
                break
            except FileExistsError:
                directory = _next_version(runs)
        _own[trainer] = directory
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def _next_version(runs: Path) -> Path:
    taken = [int(path.name[8:]) for path in runs.glob("version_*") if path.name[8:].isdigit()]
    return runs / f"version_{max(taken, default=-1) + 1}"


def _scratch_directory(trainer: Trainer) -> Path:
    if trainer not in _scratch:
        _scratch[trainer] = tempfile.TemporaryDirectory(prefix="lightning_rl_fast_dev_run_")
        rank_zero_info(
            "fast_dev_run keeps nothing: checkpoints, reports, exports and rollouts go to "
            f"{_scratch[trainer].name}, which is deleted at the end"
        )
    return Path(_scratch[trainer].name)


NAME = ".lock"
_held: dict[Path, int] = {}  # descriptors of this process


def hold(directory: Path) -> None:
    """Lock a run directory until :func:`release`, or the end of this process.

    Locking it again in the same process has no effect. The lock is the kernel's (``lockf``), so the
    file that a killed process leaves behind locks nothing.

    Raises:
        ConfigError: if another process holds the lock; names that process.
        DiskError: if the directory cannot be written.
    """
    path = directory.resolve() / NAME
    if path in _held:
        return
    descriptor = _open(path)
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)
    except (BlockingIOError, PermissionError):
        who = _holder(descriptor)
        os.close(descriptor)
        raise _in_use(directory, who) from None
    except OSError as error:  # a network file system without locks
        os.close(descriptor)
        rank_zero_warn(
            f"{directory} is on a file system without locks ({error.strerror}), so nothing stops a "
            "second process from using this run at the same time; make sure that none does"
        )
        return
    os.ftruncate(descriptor, 0)
    text = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}"
    with contextlib.suppress(OSError):  # a full disk: the lock itself holds
        os.pwrite(descriptor, text.encode(), 0)
    _held[path] = descriptor


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[None]:
    """Within the block, lock a directory, created if missing; see :func:`hold`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(directory, error) from error
    hold(directory)
    try:
        yield
    finally:
        release(directory)


def require_free(directory: Path) -> None:
    """Check that no other process holds the lock, without taking it.

    Raises:
        ConfigError: if one does.
    """
    path = directory.resolve() / NAME
    if path in _held or not path.exists():
        return
    descriptor = _open(path)
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except (BlockingIOError, PermissionError):
        raise _in_use(directory, _holder(descriptor)) from None
    except OSError:
        return  # hold() will warn
    finally:
        os.close(descriptor)


def release(directory: Path) -> None:
    """Release the lock."""
    descriptor = _held.pop(directory.resolve() / NAME, None)
    if descriptor is not None:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise refused(path, error) from error


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _in_use(directory: Path, who: str) -> ConfigError:
    return ConfigError(
        f"{directory} is in use by {who}, and two runs in one directory would mix their files; "
        "wait for it, end it, or start a run elsewhere (another trainer.logger, no --ckpt_path)"
    )


# ---------------------------------------------------------------- files


def sync_directory(directory: Path) -> None:
    """Sync a directory's entries to disk: only then is a new file name safe.

    Raises:
        OSError: if the disk reports an error.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> int:
    """Append all of ``text``, or nothing; returns the file's new length in bytes.

    Raises:
        DiskError: if it cannot be written; the file is then unchanged.
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
    """Replace a file's content atomically: the old content stays until all of the new is on disk.

    Raises:
        DiskError: if it cannot be written; the file is then unchanged.
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


def require_writable(directory: str | Path, key: str) -> None:
    """Check that a local directory can be written, or created, before anything starts.

    Raises:
        ConfigError: naming the configuration key and the obstacle.
    """
    there = local_path(directory, key).absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is a file, but must be a directory; choose another")
    if not _takes_files(there):
        raise ConfigError(
            f"{key}: {there} cannot be written (it is read-only, or belongs to another user); "
            "choose another directory, or change its permissions"
        )


def _takes_files(directory: Path) -> bool:
    """Try to write, since permissions do not tell: root may not write to /proc or some disks."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def refused(path: Path, error: OSError) -> DiskError:
    """Return the error of a file that could not be written, with the space that is left."""
    return DiskError(
        f"{path} could not be written: {error.strerror or error} ({free_space(path)}); the file "
        "there is unchanged. Free some disk space, or write elsewhere (trainer.logger, "
        "trainer.default_root_dir), and resume from the last checkpoint"
    )


def free_space(path: Path) -> str:
    """Describe the free space of the disk that a file is on, or would be on."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB free"
