"""The directory of a run, of one process at a time, and the files in it.

Files are whole or as they were, also when the disk is full or the power fails.
"""

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.errors import ConfigError, DiskError
from lightning_rl.run import dist
from lightning_rl.run.hooks import is_fast_dev_run

OWN_RUNS = "lightning_rl_runs"
"""Where in ``default_root_dir`` runs are that no logger has a directory for."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Also of one that Lightning made a path of, ``file:/x``; a drive has one letter."""

_known: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_own: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_scratch: WeakKeyDictionary[Trainer, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def run_dir(trainer: Trainer) -> Path:
    """The directory of a run's results; created.

    That is the directory of the first logger, if it is a ``TensorBoardLogger`` or ``CSVLogger``,
    which begin a new one for every run. Otherwise it is ``lightning_rl_runs/version_<n>`` in
    ``default_root_dir``. Of a fast dev run it is a scratch directory, which is deleted at the end.

    On several ranks it is rank 0's. They all have to make the first call, since it asks rank 0
    (the data modules do, first thing in ``setup``); later calls may be made by any.
    """
    directory = _known.get(trainer)
    if directory is None:
        directory = _choose(trainer)
        if dist.world_size() == trainer.world_size:  # else the ranks cannot talk yet
            directory = _known[trainer] = Path(trainer.strategy.broadcast(str(directory)))
            directory.mkdir(parents=True, exist_ok=True)
    return directory


def require_writable_dirs(trainer: Trainer) -> None:
    """Check the directories that a run will write to, before a logger fails with a bare error.

    Loggers that keep no files of a run beside others' may save to a URL.

    Raises:
        ConfigError: naming the first that cannot be written.
    """
    if is_fast_dev_run(trainer):
        return
    for logger in trainer.loggers:
        holds_runs = isinstance(logger, TensorBoardLogger | CSVLogger)
        if logger.save_dir is not None and (holds_runs or not _URL.match(str(logger.save_dir))):
            require_writable(logger.save_dir, "trainer.logger.save_dir")
    require_writable(trainer.default_root_dir, "trainer.default_root_dir")


def output_path(trainer: Trainer, given: str | Path | None, name: str) -> Path:
    """``given``, where a user chose a place of his own; else ``name`` in the run directory.

    A fast dev run leaves the user's own files alone, and takes the run directory for them too.
    """
    if given is not None and not is_fast_dev_run(trainer):
        return Path(given)
    return run_dir(trainer) / name


def own_runs(trainer: Trainer) -> Path | None:
    """The folder of the runs that no logger has a directory for; None where one has.

    Raises:
        ConfigError: if it is no local one.
    """
    if isinstance(trainer.logger, TensorBoardLogger | CSVLogger):
        return None
    return _local(trainer.default_root_dir, "trainer.default_root_dir") / OWN_RUNS


def continue_in(trainer: Trainer, directory: Path) -> None:
    """Let a run go on in the directory of an earlier one, which is among ``own_runs``."""
    _own[trainer] = directory


def _choose(trainer: Trainer) -> Path:
    """Choose the run directory, as this rank sees it; rank 0 creates it."""
    if is_fast_dev_run(trainer):
        return _scratch_directory(trainer)
    runs = own_runs(trainer)
    if runs is None:
        directory = _local(trainer.logger.log_dir, "trainer.logger.save_dir")  # type: ignore[union-attr, arg-type]
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
    """Hold a run directory's lock until :func:`release`, or the end of this process.

    Holding it twice in one process is holding it. The lock is the kernel's (``lockf``), so what a
    killed process leaves behind is a file that locks nothing.

    Raises:
        ConfigError: if another process holds it; names that.
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
            f"{directory} is on a file system without locks ({error.strerror}): nothing keeps a "
            "second process from going on with this run at the same time; see to it yourself"
        )
        return
    os.ftruncate(descriptor, 0)
    text = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}"
    with contextlib.suppress(OSError):  # a full disk: the lock itself holds
        os.pwrite(descriptor, text.encode(), 0)
    _held[path] = descriptor


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[None]:
    """While it lasts a directory, made if need be, is ours; see :func:`hold`."""
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
    """Look whether another process holds the lock, without taking it.

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
    """Give the lock back."""
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
        f"{directory} is in use by {who}: two runs in one directory would mix their files; wait "
        "for it, end it, or begin a run elsewhere (another trainer.logger, no --ckpt_path)"
    )


# ---------------------------------------------------------------- files


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


def require_writable(directory: str | Path, key: str) -> None:
    """Check that a local directory can be written, or made, before anything is begun.

    Raises:
        ConfigError: naming the key, and what stands in the way.
    """
    there = _local(directory, key).absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is a file, where a directory should be; name another")
    if not _takes_files(there):
        raise ConfigError(
            f"{key}: {there} cannot be written (read-only, or of another user); name another "
            "directory, or change its rights"
        )


def _local(path: str | Path, key: str) -> Path:
    if _URL.match(str(path)):
        raise ConfigError(
            f"{key}={str(path)!r} is a URL, and a run's files are local ones; name a local "
            "directory, and copy it afterwards or mount what the URL names"
        )
    return Path(path)


def _takes_files(directory: Path) -> bool:
    """Try it: by its rights root may write anywhere, and yet not in /proc or on some disks."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def refused(path: Path, error: OSError) -> DiskError:
    """The error of a write: what the operating system said, and how much room there is."""
    return DiskError(
        f"{path} could not be written: {error.strerror or error} ({free_space(path)}); what was "
        "there before is intact. Make room, or write elsewhere (trainer.logger, "
        "trainer.default_root_dir), and go on from the last checkpoint"
    )


def free_space(path: Path) -> str:
    """The room on the disk that a file is on, or would be."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB free"
