"""A server that we start, and what it printed when it did not."""

import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_rl.run.child import Child

_PACKAGE_ROOT = str(Path(__file__).parents[2])


def free_port(host: str) -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ServerProcess(Child):
    """A server that does not outlive this process.

    Args:
        command: what to run.
        environment: variables to set beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        super().__init__(command, env, told=signal.SIGTERM, log=True)

    def tail(self, lines: int = 3) -> str:
        """The last lines that it printed, errors alone if there are any."""
        printed = self.printed(20_000).decode(errors="replace")
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
