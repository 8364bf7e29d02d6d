"""Tools of MCP servers (Model Context Protocol), through the protocol's official SDK."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, TextIO, cast

from lightning_rl.agents.tool_server import ServedTool, ToolServer
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, EpisodeError
from lightning_rl.run.loop.background import innermost, run_async

_TAIL = 300
"""Characters of a server's errors that are quoted if it does not start."""


@configurable
class MCPTools(ToolServer):
    """The tools of an MCP server, which ``ToolAgent`` offers to the model.

    The server is started, or connected to, when a run first needs its tools, and again after it was
    lost: rollouts whose calls it did not answer then fail, and the run continues. All rollouts
    share the connection, and call the tools concurrently. A tool's error is reported to the model.

    Args:
        command: the program, with its arguments, of a server to start and to talk to over its
            standard input and output; its working directory and PATH are this process's.
        url: the address of a running server that is talked to over streamable HTTP.
        names: tools to offer; None: all of them.
        environment: further variables for the started server; it inherits few.
        headers: HTTP headers for the running server, such as ``{"Authorization": "Bearer ..."}``.
        start_timeout: time limit for the connection, in seconds.

    Raises:
        ConfigError: if not exactly one of ``command`` and ``url`` is given; later if the SDK is
            missing, the server does not answer, or it lacks a tool.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        url: str | None = None,
        names: list[str] | None = None,
        environment: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ConfigError(f"MCPTools(command={command}, url={url}) needs exactly one of both")
        if not start_timeout > 0:
            raise ConfigError(f"MCPTools(start_timeout={start_timeout}) must be > 0 seconds")
        self.command = command
        self.url = url
        self.names = names
        self.environment = environment
        self.headers = headers
        self.start_timeout = start_timeout
        self._connection: asyncio.Task[_Connection] | None = None

    def __repr__(self) -> str:
        return f"MCPTools({self.url or ' '.join(self.command or [])!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}  # each process has one of its own

    def tools(self) -> list[ServedTool]:
        """Connect, and return the tools.

        Raises:
            ConfigError: if the SDK is missing, the server does not answer, or it lacks a tool.
        """
        try:
            listed = run_async(self._listed())
        except EpisodeError as error:
            raise ConfigError(str(error)) from error
        known = {tool.name: tool for tool in listed}
        if missing := [name for name in self.names or () if name not in known]:
            raise ConfigError(f"{self!r} has no tool {missing[0]!r}; it has {', '.join(known)}")
        return [
            self.served(name, known[name].description, known[name].input_schema)
            for name in (known if self.names is None else self.names)
        ]

    def close(self) -> None:
        """Disconnect, and stop a server that was started; the next call connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            run_async(_end(connection))

    async def _listed(self) -> Sequence[Any]:
        client = (await self._connected()).client
        result, cursor, seen = [], None, set[str]()
        while True:  # page by page
            page = await client.list_tools(cursor=cursor)
            result += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return result
            if cursor in seen:
                raise EpisodeError(f"{self!r} lists its tools without end: page {cursor!r} again")
            seen.add(cursor)

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool; return its result: a text, or the content parts of a message with images.

        Raises:
            EpisodeError: if the server was lost.
            RuntimeError: with the tool's own message, if it reports an error.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        connection = await self._connected()
        try:
            result = await connection.client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            if self._connection is not None and self._connection.done():
                self._connection = None  # the next call connects again
            raise EpisodeError(f"{self!r} was lost during a call of {name!r}") from error
        parts = [_shown(part) for part in result.content]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise RuntimeError(text or "the tool gave no reason")
        return text if all(part["type"] == "text" for part in parts) else parts

    async def _connected(self) -> "_Connection":
        """Return the connection; one task makes it, for all that ask."""
        if self._connection is None or self._connection.cancelled():
            self._connection = asyncio.ensure_future(_Connection.to(self))
        try:
            return await asyncio.shield(self._connection)
        except EpisodeError:
            self._connection = None
            raise


class _Connection:
    """A client, and the task that entered it and has to leave it."""

    def __init__(self) -> None:
        self.client: Any = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def to(cls, server: MCPTools) -> "_Connection":
        """Connect to a server.

        Raises:
            ConfigError: if the SDK is missing.
            EpisodeError: if the server does not answer in time.
        """
        self = cls()
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            log = cast("TextIO", file)
            self._task = asyncio.ensure_future(self._hold(server, log))
            try:
                async with asyncio.timeout(server.start_timeout):
                    await asyncio.shield(self._ready)
            except ConfigError:
                raise
            except Exception as error:  # a server may do anything
                self._task.cancel()
                cause = innermost(error)
                why = f"{type(cause).__name__}: {cause}"
                if isinstance(error, TimeoutError):
                    why = f"no answer within start_timeout={server.start_timeout:g} s"
                log.seek(0)
                printed = " ".join(log.read()[-_TAIL:].split())
                raise EpisodeError(
                    f"{server!r} cannot be used: {why}{printed and f'; it wrote: {printed}'}"
                ) from error
        return self

    async def _hold(self, server: MCPTools, log: TextIO) -> None:
        try:
            async with AsyncExitStack() as stack:
                self.client = await stack.enter_async_context(await _client(server, log, stack))
                self._ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def end(self) -> None:
        self._over.set()
        if self._task is not None:
            await self._task


async def _end(connection: "asyncio.Task[_Connection]") -> None:
    if not connection.done():
        connection.cancel()
    elif not connection.cancelled() and connection.exception() is None:
        await connection.result().end()


async def _client(server: MCPTools, log: TextIO, stack: AsyncExitStack) -> Any:
    try:
        from httpx2 import AsyncClient
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise ConfigError("MCPTools needs MCP's SDK: `pip install 'mcp>=2,<3'`") from error
    if server.url is not None:
        http = None
        if server.headers:
            http = await stack.enter_async_context(AsyncClient(headers=server.headers))
        return Client(streamable_http_client(server.url, http_client=http))
    assert server.command is not None
    program, *arguments = server.command
    started = StdioServerParameters(command=program, args=arguments, env=server.environment)
    return Client(stdio_client(started, log))


def _shown(part: Any) -> dict[str, Any]:
    """Return a part of a result as one of a message: a text, an image, or all else as JSON."""
    if part.type == "image":
        url = f"data:{part.mime_type};base64,{part.data}"
        return {"type": "image_url", "image_url": {"url": url}}
    text = part.text if part.type == "text" else part.model_dump_json(exclude_none=True)
    return {"type": "text", "text": text}
