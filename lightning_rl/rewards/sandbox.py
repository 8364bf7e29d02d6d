"""A sandbox of Linux namespaces, without privileges and without a container.

Inside there is no network, no process but the sandbox's own, also in ``/proc``, and no file to
write outside one directory in memory. Only the standard library is imported: workers start quickly.
"""

import ctypes
import os
from collections.abc import Callable

from lightning_rl.run.keeper import die_with_parent, keep_others_out

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


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
    namespaces = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    _check("unshare", _libc.unshare(namespaces))
    # Not root inside, or each program that is started would get capabilities again.
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user or _NOBODY} {user} 1")
    _write("/proc/self/gid_map", f"{group or _NOBODY} {group} 1")
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
    _check("unshare", _libc.unshare(_CLONE_NEWNS))
    _check("mount", _libc.mount(None, root, None, _MS_REC | _MS_PRIVATE, None))
    # struct mount_attr: what to set, what to clear, propagation, user namespace
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    _check(
        "mount_setattr",
        _libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            root,
            _AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
    )
    options = f"size={megabytes}m,nr_inodes=4096,mode=700".encode()
    _check("mount", _libc.mount(b"none", target, b"tmpfs", _MS_NOSUID | _MS_NODEV, options))
    _hide_processes()
    _check("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check("capset", _libc.capset(ctypes.byref(header), ctypes.byref(none)))
    # Process 1 serves the next sample too: no sample may trace it, or write to its memory.
    keep_others_out()


def _hide_processes() -> None:
    """The ``/proc`` of outside shows all command lines: cover it with that of these processes.

    A container that hides parts of its own ``/proc`` may have no other; then there is none at all.
    """
    harmless = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(b"proc", b"/proc", b"proc", harmless, None) != 0:
        _check("mount", _libc.mount(b"none", b"/proc", b"tmpfs", harmless, b"size=4k"))


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
