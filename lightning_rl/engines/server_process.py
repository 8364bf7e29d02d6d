"""A server that we start, and what it printed when it did not."""

import errno
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from lightning_rl.run.child import Child

_ASKED_FOR = range(20_000, 30_000)
"""Below what Linux (from 32768) and others (49152) hand out for connections, or Kubernetes for
nodes."""
_HERE = "127.0.0.1"
_PACKAGE_ROOT = str(Path(__file__).parents[2])


def held_port(host: str) -> socket.socket:
    """A socket with a port that only who asks for it by number can listen on, meanwhile.

    That takes ``SO_REUSEADDR``, which all servers set. To those who ask for any port, it is not
    given before and after either.

    Raises:
        OSError: if the host is not this machine, or no port is free.
    """
    held = socket.socket()
    begin = random.SystemRandom().randrange(len(_ASKED_FOR))
    for port in chain(_ASKED_FOR[begin:], _ASKED_FOR[:begin]):
        try:
            held.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                held.close()
                raise
        else:
            # Not before: two of us could hold the same one.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
    held.close()
    raise OSError(f"none of the ports in {_ASKED_FOR} is free on {host}")


def free_port(host: str = _HERE) -> int:
    """A TCP port of this machine that nobody listens on."""
    with held_port(host) as held:
        return int(held.getsockname()[1])


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


class ListeningServer(ServerProcess):
    """A server on a port of this machine, which it is told by ``--host`` and ``--port``.

    The port is held for it: vLLM takes seconds until it listens, in which any other process could
    be given the same.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._held = held_port(_HERE)
        port = self._held.getsockname()[1]
        self.url = f"http://{_HERE}:{port}"
        super().__init__([*command, "--host", _HERE, "--port", str(port)], environment)
        if sys.platform != "linux":  # elsewhere it would keep the server from it, too
            self._held.close()

    def kill(self) -> None:
        super().kill()
        self._held.close()


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
