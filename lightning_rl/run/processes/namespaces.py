"""Linux namespaces, by system calls that Python does not offer.

Only the standard library is imported, and any Python from 3.9 on can run it: other environments use
it too.
"""

from __future__ import annotations

import ctypes
import os

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_REC, MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH = 2
_PR_CAPBSET_DROP, _CAP_SYS_ADMIN = 24, 21
_CAPABILITY_VERSION_3 = 0x20080522
_HARMLESS = MS_NOSUID | MS_NODEV | MS_NOEXEC

libc = ctypes.CDLL(None, use_errno=True)


def check(call: str, result: int) -> None:
    """Raise the error of a system call that failed.

    Raises:
        OSError: unless the result is 0.
    """
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(namespaces: int) -> None:
    """Move this process to new namespaces, with the same user and group as outside.

    Args:
        namespaces: flags of the namespaces; a new process namespace holds only later forks.

    Raises:
        OSError: if it is not permitted.
    """
    user, group = os.getuid(), os.getgid()
    check("unshare", libc.unshare(namespaces))
    if namespaces & NEWUSER:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def drop_capabilities() -> None:
    """Give up every privilege for good, except that root regains its own when it runs a program.

    Raises:
        OSError: if the kernel is too old.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    check("capset", libc.capset(ctypes.byref(header), ctypes.byref(none)))


def leave_processes() -> bool:
    """Have the processes that are forked from now on see each other, and no others.

    The first of them must call :func:`mount_own_processes`. If this process has the necessary
    privileges, it keeps them; otherwise it moves to a user namespace, in which nobody becomes
    another user.

    Returns:
        True in a user namespace: call :func:`drop_capabilities` before running code that must not
        undo this.

    Raises:
        OSError: if this machine does not permit it.
    """
    try:
        unshare(NEWPID | NEWNS)
    except PermissionError:
        unshare(NEWUSER | NEWPID | NEWNS)
        check("prctl", libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, 0, 0, 0))
        return True
    return False


def mount_own_processes() -> None:
    """Mount the ``/proc`` of this process's namespace.

    Raises:
        OSError: if this machine does not permit it.
    """
    check("mount", libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None))
    libc.umount2(b"/proc", _MNT_DETACH)  # without privileges it stays, and is covered
    check("mount", libc.mount(b"proc", b"/proc", b"proc", _HARMLESS, None))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
