"""One process per run directory: a lock that ends with the process that holds it."""

import contextlib
import os
import socket
import time
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.disk import refused
from lightning_rl.errors import ConfigError

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
