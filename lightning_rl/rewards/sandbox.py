"""A sandbox for commands that run what a model wrote, made by bubblewrap."""

import functools
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence

from lightning_rl.errors import ConfigError
from lightning_rl.run.processes.machine import ALLOW_SANDBOX

FILES_MB = 64
"""Megabytes that ``/tmp`` of a sandbox holds, its only writable directory."""
MAX_PROCESSES = 64
"""Maximum processes and threads of a program in a sandbox; the kernel exempts root."""
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd"),
)
_NOBODY = "65534"
_NEW = [
    "--unshare-user",
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--cap-drop",
    "ALL",
]
# A container that hides parts of its own /proc permits no other: then it is empty.
_PROCESSES = (["--proc", "/proc"], ["--size", "4096", "--tmpfs", "/proc", "--remount-ro", "/proc"])

_WITHOUT = "or set sandbox: false, whose limits protect from accidents only"


def sandboxed(command: Sequence[str], readable: Sequence[str] = ()) -> list[str]:
    """Return the command that runs ``command`` in a sandbox of its own, as its process 1.

    It has no network, sees no process from outside, and can write only to ``/tmp``, 64 MiB in
    memory. It can read the system's programs and libraries, this Python with its installed
    packages, and ``readable``. Everything in it ends with ``command``, and with the thread that
    started it. Set the limits and environment variables of ``command`` where it is started.

    Args:
        command: a program and its arguments; the program's path must be readable inside.
        readable: further files and directories that it may read.

    Raises:
        ConfigError: if bubblewrap is not installed, or may not make a sandbox on this machine.
    """
    try:
        room = _room("--tmpfs", "/tmp", "--chdir", "/tmp")
    except ConfigError as error:
        raise ConfigError(f"{error}; {_WITHOUT}") from error
    folders = [*_SYSTEM, *installed(), *readable]
    return [*room, *_shown(folders), "--remount-ro", "/", "--", *command]


def emptied(
    command: Sequence[str], readable: Sequence[str], folders: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs ``command`` where there is nothing but ``readable``.

    All else is as in :func:`sandboxed`, except that directories can be made and files written
    anywhere, in 64 MiB of memory: ``readable`` has to name the program and its libraries, too.

    Args:
        command: a program and its arguments.
        readable: the files and directories that it may read.
        folders: empty directories that it finds.

    Raises:
        ConfigError: as :func:`sandboxed` does.
    """
    made = [word for folder in folders for word in ("--dir", folder)]
    return [*_room("--tmpfs", "/"), *made, *_shown(readable), "--", *command]


def installed() -> list[str]:
    """Return the directories of this Python, of packages installed for it, and of libraries."""
    libraries = filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    folders = {sys.prefix, sys.base_prefix, site.getusersitepackages(), *libraries}
    return sorted(folders | {os.path.realpath(folder) for folder in folders})


def _shown(places: Sequence[str]) -> list[str]:
    return [word for folder in places for word in ("--ro-bind-try", folder, folder)]


@functools.cache
def _room(*writable: str) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "a sandbox needs bubblewrap 0.7 or newer, but there is no bwrap on the PATH: "
            "apt-get install bubblewrap, or conda install -c conda-forge bubblewrap"
        )
    printed = ""
    for processes in _PROCESSES:
        # They come first: what is readable may lie in them.
        files = ["--size", str(FILES_MB * 2**20), *writable]
        devices = ["--dev", "/dev", "--remount-ro", "/dev"]
        user = ["--uid", _NOBODY, "--gid", _NOBODY]
        room = [program, *_NEW, *user, *files, *devices, *processes]
        tested = [*room, *_shown(_SYSTEM), "--", "/bin/true"]
        tried = subprocess.run(tested, capture_output=True, text=True)
        if tried.returncode == 0:
            return room
        printed = printed or tried.stderr.strip()
    raise ConfigError(f"bubblewrap cannot make a sandbox here ({printed}): {ALLOW_SANDBOX}")
