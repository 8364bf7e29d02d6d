"""Servers in use: shared by all that name them, started when needed and again when they ended."""

import asyncio
import signal
import sys
from contextlib import suppress
from socket import socket
from typing import Any

import aiohttp

from lightning_rl.engines.replicas.server_process import held_port
from lightning_rl.errors import EpisodeError
from lightning_rl.openenv.server import OpenEnvServer
from lightning_rl.run.processes.child import Child, ending, last_lines

_HERE = "127.0.0.1"
_LOOK_S = 0.05
"""Seconds between two looks whether a server answers, or has ended."""
_END_S = 5.0
"""Seconds until a server that closed a connection is known to have ended, if it has."""


class ServerLost(EpisodeError):
    """A server does not answer, or the environment behind it raised; another attempt may help."""


class Running:
    """A server in use; for one that is started here, its process.

    ``places`` is acquired by each episode, and ``alone`` by an episode that is repeated after it
    was lost: so an action that ends the server each time costs no episode but its own.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._child: Child | None = None
        self._held: socket | None = None
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def here(self) -> "Running":
        """Return itself, ready for use in the loop that runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first time, or after another loop was given up
            self._loop = loop
            self.places = asyncio.Semaphore(self._server.sessions)
            self.alone, self._starting = asyncio.Lock(), asyncio.Lock()
        return self

    def connections(self) -> aiohttp.ClientSession:
        """Return a client, which passes a proxy only on its way to another machine."""
        limit = aiohttp.ClientTimeout(total=self._server.answer_seconds)
        return aiohttp.ClientSession(trust_env=self._server.address is not None, timeout=limit)

    async def url(self) -> str:
        """Return the server's address, once it was started if it does not run.

        Raises:
            EpisodeError: if it cannot be started.
        """
        if self._server.address is not None:
            return self._server.address
        async with self._starting:
            if self._child is None or not self._child.running:
                await self._start()
        return f"http://{_HERE}:{self._port}"

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the environment's actions.

        Raises:
            EpisodeError: if the server cannot be started, or does not tell.
        """
        url = f"{await self.url()}/schema"
        try:
            async with self.connections() as client, client.get(url) as answer:
                answer.raise_for_status()
                schema = (await answer.json())["action"]
                if not isinstance(schema, dict):
                    raise TypeError(f"action={schema!r:.80} is no schema")
                return schema
        except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
            raise self.unreachable(url, error) from error

    def unreachable(self, url: str, error: BaseException) -> ServerLost:
        """Return the error of a request that the server did not answer as it should."""
        why = f"{type(error).__name__}: {error}{self.how_it_ended()}"
        return ServerLost(
            f"{self._server!r} gave no answer at {url} ({why}); start it, or correct its address"
        )

    async def await_end(self) -> None:
        """Wait for the end of a process that closed a connection, as it ends after that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while self._child is not None and self._child.running:
                    await asyncio.sleep(_LOOK_S)

    def how_it_ended(self) -> str:
        """Say how a server that was started here has ended; empty if it goes on."""
        if self._child is None or self._child.status is None:
            return ""
        return f"; it {ending(self._child.status)}{last_lines(self._child.printed(4096))}"

    def close(self) -> None:
        """End the process, if there is one; it starts again when needed."""
        child, held, self._child, self._held = self._child, self._held, None, None
        if child is not None:
            child.kill()
        if held is not None:
            held.close()

    async def _start(self) -> None:
        self.close()
        self._server.check()
        self._held = held_port(_HERE)
        self._port = self._held.getsockname()[1]
        if sys.platform != "linux":  # elsewhere it would keep the server from it, too
            self._held.close()
        command, variables = self._server.command_line(self._port), self._server.variables()
        self._child = Child(command, variables, told=signal.SIGTERM, log=True)
        try:
            async with asyncio.timeout(self._server.start_seconds):
                await self._answers(self._child)
        except TimeoutError:
            printed = last_lines(self._child.printed(4096))
            self.close()
            raise EpisodeError(
                f"{self._server!r} did not answer within "
                f"start_seconds={self._server.start_seconds:g}{printed}"
            ) from None
        except BaseException:
            self.close()
            raise

    async def _answers(self, child: Child) -> None:
        async with self.connections() as client:
            while True:
                if not child.running:
                    raise EpisodeError(f"{self._server!r} did not start{self.how_it_ended()}")
                with suppress(aiohttp.ClientError, OSError):
                    async with client.get(f"http://{_HERE}:{self._port}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(_LOOK_S)


_shared: dict[str, Running] = {}


def running(server: OpenEnvServer) -> Running:
    """Return a server in use, one for all that share it."""
    return _shared.setdefault(server.key, Running(server))


def close(server: OpenEnvServer) -> None:
    """End a server that was started here, if it runs."""
    if (used := _shared.pop(server.key, None)) is not None:
        used.close()
