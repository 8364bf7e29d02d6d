"""A server process that we start, watch and end: it must not outlive the trainer."""

import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_rl.run.keeper import end, kept

_PACKAGE_ROOT = str(Path(__file__).parents[2])


def free_port(host: str) -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A command in a session of its own, that does not outlive this process.

    Args:
        command: what to run.
        environment: variables to set beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            kept(command, told=signal.SIGTERM),
            stdin=subprocess.DEVNULL,
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
        end(self._process)

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
