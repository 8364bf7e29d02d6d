"""AgentServer: an endpoint on this machine, with a session for each rollout."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.templates import HermesParser, ToolParser
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Rollout
from lightning_rl.serving.app import AgentApp
from lightning_rl.serving.ask import DEFAULT_MODEL, Terms
from lightning_rl.serving.chat_format import ChatFormats
from lightning_rl.serving.connections import with_deadlines
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.session import Session
from lightning_rl.serving.untrusted_template import RendererApart

_KEEP_ALIVE_S = 3600
"""Seconds to keep idle connections: closing one that is being reused looks like a failure."""


class AgentServer:
    """Lets programs be agents: an OpenAI-compatible endpoint in front of an engine.

    It answers ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/v1/models`` and
    Anthropic's ``/v1/messages``. A client's key says which rollout its requests belong to. Requests
    are handled in the event loop that :meth:`start` ran in.

    Args:
        tokenizer: the policy's tokenizer; chats need its chat template.
        parser: reads tool calls in the model family's format.
        chat_options: extra variables of the chat template.
        host: the address to listen on; keep the default unless programs run on other machines:
            whoever has a session's key may use the engine.
        port: the port to listen on; 0: any free one.
        client_sampling: whether clients may change sampling settings (temperature, top-p,
            penalties ...). False keeps the run's settings, for programs that ask for temperature
            0, with which all rollouts of a group would be equal.
        limits: limits of a request; None: the defaults of :class:`RequestLimits`.

    Raises:
        ConfigError: without an ASGI server, or for a port that does not exist.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: ToolParser | None = None,
        chat_options: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        client_sampling: bool = True,
        limits: RequestLimits | None = None,
    ) -> None:
        if not 0 <= port < 2**16:
            raise ConfigError(f"port={port} must be in [0, 65535] (0: any free one)")
        if find_spec("uvicorn") is None:
            raise ConfigError(
                "AgentServer needs uvicorn, which comes with vLLM: or from "
                "`pip install uvicorn httptools`"
            )
        self.host = host
        self.port = port
        self.client_sampling = client_sampling
        self.tokenizer = tokenizer
        self.limits = limits or RequestLimits()
        self._apart = RendererApart(self.limits)
        self.formats = ChatFormats(
            tokenizer, parser or HermesParser(), chat_options or {}, self._apart
        )
        self._app = AgentApp(tokenizer)
        self._listening: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._connections: set[Any] = set()

    @property
    def url(self) -> str:
        """The endpoint's URL, without ``/v1``.

        Raises:
            ConfigError: before it listens.
        """
        if self._listening is None:
            raise ConfigError("AgentServer is not listening yet; await start() first")
        port = self._listening.sockets[0].getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Start listening in the running loop, unless it already is.

        Raises:
            ConfigError: if it cannot listen on the address.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first time, or after another was given up
            self._loop, self._listening, self._starting = loop, None, asyncio.Lock()
            self._apart.loop = loop
        async with self._starting:
            if self._listening is None:
                self._listening = await self._listen(loop)

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        import uvicorn
        from uvicorn.server import ServerState

        # Only what speaks HTTP: uvicorn's own server would listen for signals, which are the run's.
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        config.load()
        state = ServerState()
        self._connections = state.connections
        protocol = partial(
            with_deadlines(config.http_protocol_class, self.limits.max_wait_s),
            config=config,
            server_state=state,
            app_state={},
        )
        try:
            return await loop.create_server(
                protocol, self.host, self.port, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise ConfigError(
                f"AgentServer cannot listen on {self.host}:{self.port}: {error}; port: 0 takes a "
                "free one"
            ) from error

    @asynccontextmanager
    async def session(
        self,
        rollout: Rollout,
        engine: Engine,
        sampling: Sampling,
        roles: Sequence[str] = (),
    ) -> AsyncIterator[Session]:
        """Open the endpoint for one rollout, which records all requests with the session's key.

        Args:
            rollout: the rollout to fill; its recorded calls are replayed.
            engine: generates the answers.
            sampling: default sampling settings of requests.
            roles: names of further models that clients may ask for, besides ``policy``.

        Raises:
            EngineError: at the end, if the engine failed meanwhile, even if the agent did not.
        """
        await self.start()
        if DEFAULT_MODEL in roles or "" in roles:
            raise ConfigError(f"roles={list(roles)} must not name {DEFAULT_MODEL!r} or ''")
        models = {DEFAULT_MODEL: "", **{role: role for role in roles}}
        session = Session(
            rollout,
            engine,
            Terms(self.formats, sampling, self.client_sampling, models, self.limits),
            self.url,
            f"sk-{secrets.token_urlsafe(24)}",
        )
        self._app.open(session)
        try:
            yield session
        except Exception as error:
            if session.failure is None:
                raise
            raise session.failure from error  # which is why the program failed
        finally:
            self._app.end(session)
            await session.close()
        if session.failure is not None:
            raise session.failure

    async def close(self) -> None:
        """Stop listening, and end all sessions and connections. Closing twice is fine."""
        self._apart.close()
        listening, self._listening = self._listening, None
        if listening is None:
            return
        listening.close()
        await self._app.close()
        for connection in list(self._connections):
            connection.transport.close()
