"""A server process that we start, and the end of its output if it fails."""

import errno
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from tempfile import TemporaryDirectory

from lightning_rl.config.names import LIBRARY
from lightning_rl.run.processes.child import Child

_ASKED_FOR = range(20_000, 30_000)
"""Ports below the ranges from which Linux (from 32768) and others (49152) assign ports to
connections, and Kubernetes to nodes.
"""
_HERE = "127.0.0.1"


def held_port(host: str) -> socket.socket:
    """Return a socket that reserves a port, on which only a server told its number can listen.

    The server must set ``SO_REUSEADDR``, as all servers do. Processes that ask for any free port
    are not given this one.

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
    """Return a TCP port of this machine on which nothing listens."""
    with held_port(host) as held:
        return int(held.getsockname()[1])


class ServerProcess(Child):
    """A server that ends with this process at the latest.

    Args:
        command: the command to run.
        environment: environment variables to set in addition to those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(LIBRARY.parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        super().__init__(command, env, told=signal.SIGTERM, log=True)

    def tail(self, lines: int = 3) -> str:
        """Return the last lines of its output, errors alone if there are any."""
        printed = self.printed(20_000).decode(errors="replace")
        if failure := validation_failure(printed):
            return failure
        errors = _ERROR.findall(printed)
        return " | ".join(line.strip() for line in (errors or printed.splitlines())[-lines:])


class ListeningServer(ServerProcess):
    """A server on a port of this machine, passed to it by ``--host`` and ``--port``.

    The port is reserved for it, since vLLM takes seconds until it listens, and any other process
    could be given the same port meanwhile. It gets a folder for its sockets, which is removed at
    its end, since a process that is killed leaves them behind.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._held = held_port(_HERE)
        port = self._held.getsockname()[1]
        self.url = f"http://{_HERE}:{port}"
        self._sockets = TemporaryDirectory(prefix="lightning_rl_")
        environment = {"VLLM_RPC_BASE_PATH": self._sockets.name, **environment}
        super().__init__([*command, "--host", _HERE, "--port", str(port)], environment)
        if sys.platform != "linux":  # elsewhere it would keep the server from it, too
            self._held.close()

    def kill(self) -> None:
        super().kill()
        self._held.close()
        self._sockets.cleanup()


_ERROR = re.compile(
    r"^(?:[\w.]*(?:Error|Exception)|[\w.]+: error): (?!.*root cause above).*", re.MULTILINE
)
_VALIDATION = re.compile(
    r"\d validation errors? for \w+\n(?:(?P<field>\S+)\n)?\s+(?:Value error, )?(?P<why>.*)"
)


def validation_failure(text: str) -> str | None:
    """Return the fault found by pydantic, which its text spreads over many lines; None if none."""
    if (found := _VALIDATION.search(text)) is None:
        return None
    why = found["why"].partition(" [type=")[0]
    return f"{found['field']}: {why}" if found["field"] else why
