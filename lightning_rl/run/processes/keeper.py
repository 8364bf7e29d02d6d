"""Processes that do not outlive the one that started them, with all their descendants.

    python -I -S keeper.py PARENT TOLD GRACE_S COMMAND...

runs a command under a keeper: its parent, which also adopts all processes that the command leaves
behind, in whichever group or session they are. The keeper kills all of them once the command has
ended, when the process PARENT is gone, or at once when it gets SIGTERM itself; it then ends with
the command's status. When PARENT is gone the command gets the signal TOLD (0: none, as it notices
by itself), and GRACE_S seconds to end.

Only the standard library is imported, and any Python from 3.9 on can run it: so keepers start fast,
and the Pythons of other environments can use this file too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence

GRACE_S = 5.0
"""Seconds that a command has to end by itself once its parent is gone."""
STUCK_S = 10.0
"""Seconds after which a keeper that was told to end is killed: something has stopped it."""
CLEAN_UP_S = 2.0
"""Seconds that Python's resource trackers have to remove what killed processes left behind."""
_POLL_S = 0.01
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # linux/prctl.h
_NO_SUCH_PROGRAM = 127  # as a shell says

_libc = ctypes.CDLL(None, use_errno=True)


def kept(command: Sequence[str], told: int = 0, grace_s: float = GRACE_S) -> list[str]:
    """Return the command that runs ``command`` under a keeper of this process.

    SIGTERM makes the keeper kill all its processes and end at once.

    Args:
        command: the command to run.
        told: the signal that it gets when its parent is gone; 0: none, as it notices by itself.
        grace_s: seconds that it then has to end.
    """
    # Not its parent as the keeper finds it: that may be gone when the keeper looks.
    own = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(told)), str(grace_s)]
    return [*own, *command]


def _stay_kept(parent: int, told: int, grace_s: float) -> None:
    """Fork a child to continue in, and become its keeper: only the child returns."""
    try:
        parents_end = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    keeper = os.getpid()
    # Before there is a child: it may be told to end, or be stopped, as soon as that one runs.
    asked = _when_told_to_end()
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os.close(parents_end)
        die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run
    # Who reads what the command says hears of its end, or that it closed its output.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.close(nothing)
    childs_end = os.pidfd_open(child)
    ready = first_of([asked, parents_end, childs_end])
    if parents_end in ready and asked not in ready:
        if told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, told)
        first_of([asked, childs_end], grace_s)
    _end_as(end_all(child))


def first_of(files: Sequence[int], seconds: float | None = None) -> set[int]:
    """Wait until one of these files is readable; returns those that are, none after ``seconds``."""
    watched = select.poll()  # select() knows no files beyond number 1023
    for file in files:
        watched.register(file, select.POLLIN)
    return {file for file, _ in watched.poll(None if seconds is None else seconds * 1000)}


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that forked it is gone."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def keep_others_out(out: bool = True) -> None:
    """Keep unprivileged processes from tracing this one, or using its files and memory.

    Forked children inherit this until they call it with False; ``exec`` resets it.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(not out), 0, 0, 0))


def children() -> list[int]:
    """Return the ids of the processes whose parent is this one's main thread."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(child) for child in file.read().split()]


def end_all(child: int) -> int:
    """Kill and reap everything below this process; returns the wait status of ``child``.

    With :func:`adopt_orphans` the children of a killed process become ours, so this returns only
    when none is left. Python's resource trackers get ``CLEAN_UP_S`` seconds: they end by themselves
    once those who used them are gone, after removing what these left in shared memory.
    """
    status, end = 0, time.monotonic() + CLEAN_UP_S
    while True:
        spared = kill_children(spare_trackers=time.monotonic() < end)
        try:
            ended, code = os.waitpid(-1, os.WNOHANG if spared else 0)
        except ChildProcessError:
            return status
        if ended == child:
            status = code
        if ended == 0:
            time.sleep(_POLL_S)


def kill_children(spare_trackers: bool = False) -> bool:
    """Kill all children of this process; as process 1, all processes of its namespace.

    Returns:
        whether a resource tracker was spared.
    """
    if os.getpid() == 1:  # of a namespace: all at once, so that nothing can fork away
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return False
    spared = False
    for child in children():
        if spare_trackers and is_tracker(child):
            spared = True
            continue
        # It may have just ended, or have become another user's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    return spared


def is_tracker(process: int) -> bool:
    """Return True for one of Python's resource trackers."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _when_told_to_end() -> int:
    """Return a file that becomes readable once this process is told to end."""
    asked, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(tell, b"."))
    return asked


def _end_as(status: int) -> None:
    """End in the same way as a process with this wait status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def main() -> None:
    """Become a keeper, and run the command in its child."""
    parent, told, grace_s, *command = sys.argv[1:]
    _stay_kept(int(parent), int(told), float(grace_s))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{type(error).__name__}: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(_NO_SUCH_PROGRAM)


if __name__ == "__main__":
    main()
