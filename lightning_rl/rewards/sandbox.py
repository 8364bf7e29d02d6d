"""A sandbox of Linux namespaces, without privileges and without a container.

Process 1 of a sandbox runs programs one after another, each as process 1 of its own room. A room
has no network, sees no process but its own, also in ``/proc``, and can write only to one in-memory
directory, which is new in each room. Its processes cannot address any process outside, so they
cannot signal, trace or limit whatever runs them. Only the standard library is imported, so workers
start quickly.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

from lightning_rl.run.processes.keeper import die_with_parent, keep_others_out
from lightning_rl.run.processes.namespaces import (
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    check,
    drop_capabilities,
    hide_processes,
    libc,
    unshare,
)

# linux/mount.h, linux/prctl.h
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_NO_NEW_PRIVS = 38
_NOBODY = 65534


def run_in_sandbox(body: Callable[[], None], directory: str, megabytes: int) -> None:
    """Run ``body`` as process 1 of a new sandbox, and return when it is done.

    When it ends, or this process does, the kernel kills whatever still runs inside.

    Args:
        body: must not raise; forks each program within :func:`forks_into_a_room`.
        directory: passed to :func:`shut` to try one room before ``body`` runs.
        megabytes: likewise.

    Raises:
        OSError: if this machine does not allow a sandbox; names the call that was refused.
    """
    user, group = os.getuid(), os.getgid()
    # Not root inside, or each program that is started would get capabilities again.
    unshare(NEWUSER | NEWPID | NEWNET, (user or _NOBODY, group or _NOBODY))
    reader, writer = os.pipe()

    def first() -> None:
        _make_read_only()
        with forks_into_a_room():
            tried = _fork(lambda: shut(directory, megabytes), writer)
        os.waitpid(tried, 0)
        os.close(writer)
        body()

    pid = _fork(first, writer, reader)
    os.close(writer)
    with os.fdopen(reader) as refusal:
        said = refusal.read()
    os.waitpid(pid, 0)
    if said:
        number, _, text = said.partition(" ")
        raise OSError(int(number), text)


def _fork(work: Callable[[], None], refusals: int, *unused: int) -> int:
    """Fork a child that does ``work`` and ends; it writes an OSError to ``refusals``."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            for descriptor in unused:
                os.close(descriptor)
            work()
        except OSError as error:
            os.write(refusals, f"{error.errno} {error.strerror}".encode())
        finally:
            os._exit(0)
    return pid


def _make_read_only() -> None:
    """Make all files read-only; process 1 keeps the privileges that it needs to make rooms."""
    # Only now, so that the process outside keeps its own view and can tidy up.
    unshare(NEWNS)
    check("mount", libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    # struct mount_attr: what to set, what to clear, propagation, user namespace
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(
        "mount_setattr",
        libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            b"/",
            _AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
    )
    check("prctl", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    keep_others_out()


@contextlib.contextmanager
def forks_into_a_room() -> Iterator[None]:
    """Make each fork by process 1 of a sandbox process 1 of a room; call :func:`shut` in it.

    Raises:
        OSError: if this machine does not allow it.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    unshare(NEWPID)
    try:
        yield
    finally:
        check("setns", libc.setns(own, NEWPID))
        os.close(own)


def shut(directory: str, megabytes: int) -> None:
    """Close the room whose process 1 this is: afterwards nothing in it has any privilege.

    Args:
        directory: an empty directory, the only writable place in this room.
        megabytes: its capacity.

    Raises:
        OSError: if this machine does not allow it.
    """
    unshare(NEWNS | NEWIPC)
    options = f"size={megabytes}m,nr_inodes=4096,mode=700".encode()
    mounted = libc.mount(b"none", directory.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    check("mount", mounted)
    hide_processes()
    drop_capabilities()
