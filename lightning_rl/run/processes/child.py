"""Child processes that do not outlive this one: starting, watching and ending them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from lightning_rl.run.processes.keeper import GRACE_S, STUCK_S, is_tracker, kept

_REASON_CHARACTERS = 300
_MARK = "LIGHTNING_RL_CHILD"
"""Variable by which a child's descendants are found whose keeper was killed."""
_CALL = """
import importlib, json, sys
from multiprocessing.connection import Connection
path, descriptor, module, function, *arguments = sys.argv[1:]
del sys.argv[1:]
sys.path[:] = json.loads(path)
getattr(importlib.import_module(module), function)(Connection(int(descriptor)), *arguments)
"""


class Child:
    """A command under a keeper: when this process ends, the command and all its descendants end
    too.

    It runs in its own session; otherwise Ctrl-C in a terminal would reach it too.

    Args:
        command: the command to run.
        env: its environment variables; None: those of this process.
        told: the signal that it gets when this process is gone; 0: none, as it notices by itself.
        grace_s: seconds that it then has to end.
        stdin: a file for its standard input.
        stdout: a file for its standard output; None: its standard error.
        log: keep its output for :meth:`printed`; otherwise it goes where this process's output
            goes.
        pass_fds: file descriptors that it inherits.
        keeper: False for a command that needs none: it ends by itself with the thread that started
            it, and its descendants with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        told: int = 0,
        grace_s: float = GRACE_S,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        log: bool = False,
        pass_fds: Sequence[int] = (),
        keeper: bool = True,
    ) -> None:
        self._log: IO[bytes] | None = tempfile.TemporaryFile() if log else None  # noqa: SIM115
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            kept(command, told, grace_s) if keeper else command,
            stdin=stdin,
            stdout=self._log if stdout is None else stdout,
            stderr=self._log,
            env={**(os.environ if env is None else env), name: value},
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """The return code, which :func:`ending` puts into words; None while it runs."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        """True until the command has ended, by itself or by being killed."""
        return self.status is None

    def ended_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for its end; returns True if it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Tell the keeper to kill the command and all its descendants; returns without waiting."""
        if self.running:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the command and all its descendants, and wait until they are gone."""
        self.terminate()
        if not self.ended_within(STUCK_S):
            self._process.kill()
            self._process.wait()
        if self.status == -signal.SIGKILL:  # perhaps the keeper itself: nobody ended the others
            _kill_marked(self._mark.encode())

    def printed(self, most: int) -> bytes:
        """Return the last ``most`` bytes of its log."""
        assert self._log is not None
        return tail(self._log, most)


class PythonChild(Child):
    """A child that calls a function of a module with a connection to this process, and texts.

    It can import whatever this process can, but does not run the main script again.
    """

    def __init__(self, function: Any, *arguments: str, **options: Any) -> None:
        self.connection, far = Pipe()
        with far:
            path = json.dumps([os.path.abspath(place) for place in sys.path])
            named = (str(far.fileno()), function.__module__, function.__qualname__)
            command = [sys.executable, "-c", _CALL, path, *named, *arguments]
            super().__init__(command, pass_fds=[far.fileno()], **options)

    def kill(self) -> None:
        super().kill()
        self.connection.close()


def _kill_marked(mark: bytes) -> None:
    """Kill this user's processes with the mark in their environment.

    Resource trackers end by themselves then, after removing what these left in shared memory.
    """
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            # It may have just ended, or be another user's.
            with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
                marked = mark in (process / "environ").read_bytes().split(b"\0")
                if marked and not is_tracker(int(process.name)):
                    os.kill(int(process.name), signal.SIGKILL)


def ending(status: int) -> str:
    """Describe the end of a process by its return code; a negative one is that of a signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


def tail(log: IO[bytes], most: int) -> bytes:
    """Return the last ``most`` bytes of a file."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - most))
    return log.read()


def last_lines(output: bytes | bytearray, most: int | None = None) -> str:
    """Return the last lines that a process printed, after a colon; empty if it printed nothing."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
    written = [line for line in lines if line]
    text = " | ".join(written if most is None else written[-most:])
    return f": {text[-_REASON_CHARACTERS:]}" if text else ""
