"""A sandbox of Linux namespaces, without privileges and without a container.

Inside there is no network, no process but the sandbox's own, also in ``/proc``, and no file to
write outside one directory in memory. Only the standard library is imported: workers start quickly.
"""

import ctypes
import os
from collections.abc import Callable

from lightning_rl.run.keeper import die_with_parent, keep_others_out
from lightning_rl.run.namespaces import (
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


def run_in_sandbox(
    body: Callable[[], None],
    directory: str,
    megabytes: int,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Run ``body`` as process 1 of a new sandbox, and return when it is done.

    When it ends, or this process does, the kernel kills whatever still runs inside.

    Args:
        body: must not raise.
        directory: the only place that can be written inside; empty, and empty again afterwards.
        megabytes: what it can hold.
        first: called in process 1 while it still has all privileges of the user's.

    Raises:
        OSError: if this machine does not allow it; names the call that was refused.
    """
    user, group = os.getuid(), os.getgid()
    # Not root inside, or each program that is started would get capabilities again.
    unshare(NEWUSER | NEWPID | NEWNET | NEWIPC, (user or _NOBODY, group or _NOBODY))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            die_with_parent()
            first()
            _restrict(directory, megabytes)
            os.close(writer)
            body()
        except OSError as error:
            os.write(writer, f"{error.errno} {error.strerror}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as refusal:
        said = refusal.read()
    os.waitpid(pid, 0)
    if said:
        number, _, text = said.partition(" ")
        raise OSError(int(number), text)


def _restrict(directory: str, megabytes: int) -> None:
    """All files read-only but for a file system in memory; then give up every privilege."""
    root, target = b"/", directory.encode()
    # Only now, so that the process outside keeps its own view and can tidy up.
    unshare(NEWNS)
    check("mount", libc.mount(None, root, None, MS_REC | MS_PRIVATE, None))
    # struct mount_attr: what to set, what to clear, propagation, user namespace
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(
        "mount_setattr",
        libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            root,
            _AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
    )
    options = f"size={megabytes}m,nr_inodes=4096,mode=700".encode()
    check("mount", libc.mount(b"none", target, b"tmpfs", MS_NOSUID | MS_NODEV, options))
    hide_processes()
    check("prctl", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    drop_capabilities()
    # Process 1 serves the next sample too: no sample may trace it, or write to its memory.
    keep_others_out()
