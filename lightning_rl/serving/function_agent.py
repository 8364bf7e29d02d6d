"""FunctionAgent: an async Python function is the agent."""

import inspect
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from lightning_rl.agents.base import within
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message, Prompt, Rollout
from lightning_rl.serving.agent import SessionAgent
from lightning_rl.serving.ask import DEFAULT_MODEL, Answer
from lightning_rl.serving.results import Ending
from lightning_rl.serving.session import Session
from lightning_rl.vision.messages import as_sent

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@cache
def _certificates() -> ssl.SSLContext:
    """Return the machine's certificates, shared by all clients: reading takes 20 ms and 1 MB."""
    return ssl.create_default_context()


class AgentClient:
    """Calls models for a :class:`FunctionAgent`'s function; each call is recorded and trained on.

    ``base_url`` and ``api_key`` are the endpoint's, for clients of any kind.
    """

    def __init__(self, session: Session) -> None:
        self.base_url = session.base_url
        self.api_key = session.api_key
        self._session = session

    @cached_property
    def prompt(self) -> list[Message]:
        """The rollout's prompt as a chat to send, with its pictures (as ``data:`` URLs) in it."""
        return as_sent(self._session.episode.rollout.prompt)

    async def chat(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        role: str = "",
        **fields: Any,
    ) -> Answer:
        """Return the next turn of a chat, without HTTP.

        Args:
            messages: the chat, which may contain answers' messages unchanged; a string is one user
                message.
            tools: OpenAI-style schemas.
            role: the model (policy) to ask; empty: the default one.
            fields: other fields of a chat completion's request, such as ``temperature``.

        Raises:
            RequestError: if the endpoint would answer with an error.
        """
        if tools is not None:
            fields["tools"] = list(tools)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self._session.chat(messages, model=role or DEFAULT_MODEL, **fields)

    @cached_property
    def openai(self) -> "AsyncOpenAI":
        """A client of the ``openai`` package for the endpoint; the model's name is ``policy``.

        Raises:
            ConfigError: if the package is missing.
        """
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise ConfigError("client.openai needs `pip install openai`") from error
        http = DefaultAsyncHttpxClient(verify=_certificates())
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    async def close(self) -> None:
        """Close connections."""
        if "openai" in vars(self):
            await self.openai.close()


@configurable
class FunctionAgent(SessionAgent):
    """Awaits a function for each rollout: ``async def solve(client, prompt)``.

    ``client`` is an :class:`AgentClient`, ``prompt`` the :class:`Prompt`. The function returns its
    result: nothing, a reward (a number), or a mapping like a :class:`ProgramAgent`'s result.
    ``rollout.completion`` becomes the transcript of its calls.

    ``finish_reason`` is the last call's, or ``max_seconds``, with reward 0. If the function raises,
    asks no model or returns an invalid result, its rollout is FAILED with the reason. An
    interrupted function is called again, and gets the same completions again.

    It shares the event loop with all other rollouts: run long computations in a process, and await
    whatever waits.

    Args:
        function: an async function of an importable module.
        options: arguments of ``SessionAgent``.

    Raises:
        ConfigError: if the function is not ``async``, or for values out of range.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function: Callable[[AgentClient, Prompt], Awaitable[Any]] = function
        call = function if inspect.isroutine(function) else type(function).__call__
        if not inspect.iscoroutinefunction(call):
            raise ConfigError(
                f"{self.name} is not async, so all rollouts would wait for it; make it "
                "`async def`, or run it as a separate program (ScriptAgent)"
            )

    @property
    def name(self) -> str:
        kind = type(self.function)
        return f"function {getattr(self.function, '__qualname__', kind.__qualname__)}"

    async def play(self, rollout: Rollout, session: Session) -> Ending:
        async def solve() -> Ending:
            client = AgentClient(session)
            try:
                printed = await self.function(client, rollout.prompt.copy())
            finally:
                await client.close()
            printed = {} if printed is None else printed
            return Ending(
                "done", said=printed if isinstance(printed, Mapping) else {"reward": printed}
            )

        return await within(self.max_seconds, solve(), Ending("timeout"))
