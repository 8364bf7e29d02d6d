"""Runs a command, and ends it with all that it started once the process that asked for it is gone.

    python keeper.py PARENT COMMAND...

A script of its own, of the standard library alone, so that it starts at once: a server must not
outlive the trainer, however that ends. Two ways to notice: the pipe on standard input closes, and
the kernel tells.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GRACE_S = 5.0


def main() -> None:
    """Wait for the command's end, or the parent's; then leave nothing of the group behind."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked, tell = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"."))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked to tell
        return
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    select.select([0, asked, os.pidfd_open(child.pid)], [], [])
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + _GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    # The group is this process's own: it was started as the leader of a session.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
