"""A server process that we start, watch and end, and the supervisor that it runs under.

    python server_process.py PARENT COMMAND...

runs a command, and ends it with all that it started once the process that asked for it is gone: a
server must not outlive the trainer, however that ends. Two ways to notice: the pipe on standard
input closes, and the kernel tells. Only the standard library is imported, so that it starts at
once.
"""

import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE_ROOT = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GRACE_S = 5.0


def free_port(host: str) -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A command in a session of its own, that does not outlive this process.

    Start it from a thread that lives as long as the process: the kernel takes the end of that
    thread for the end of the parent.

    Args:
        command: what to run.
        environment: variables to set beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        """Until it has ended, by itself or by us."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and all that it started; at once, for it may be stuck."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def tail(self, lines: int = 3) -> str:
        """The last lines that it printed, errors alone if there are any."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20_000))
        printed = self._log.read().decode(errors="replace")
        if told := validation_failure(printed):
            return told
        errors = _ERROR.findall(printed)
        return " | ".join(line.strip() for line in (errors or printed.splitlines())[-lines:])


_ERROR = re.compile(
    r"^(?:[\w.]*(?:Error|Exception)|[\w.]+: error): (?!.*root cause above).*", re.MULTILINE
)
_VALIDATION = re.compile(
    r"\d validation errors? for \w+\n(?:(?P<field>\S+)\n)?\s+(?:Value error, )?(?P<why>.*)"
)


def validation_failure(text: str) -> str | None:
    """The fault that pydantic found, of the many lines in which it says so; None if none."""
    if (found := _VALIDATION.search(text)) is None:
        return None
    why = found["why"].partition(" [type=")[0]
    return f"{found['field']}: {why}" if found["field"] else why


def _supervise() -> None:
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
    _supervise()
