"""Environments written for the verifiers library, as prompts and an environment for MultiTurn.

Made for the interface that verifiers has up to 0.1: ``load_environment``, ``Environment.rollout``
and ``Client``. Versions 0.2 and 0.3 keep it, but cannot be installed beside vLLM 0.32 (``mcp``);
0.4 has another one, in which programs of their own talk to a model over HTTP.
"""

import asyncio
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from lightning_rl.agents.base import Environment, Reply
from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Prompt


@configurable
class VerifiersPrompts(PromptDataset):
    """The data set that comes with an environment; chats only.

    Args:
        environment: what ``verifiers.load_environment`` takes: an importable module's name.
        arguments: for that environment.
        evaluation: its evaluation set, if it has one.
    """

    def __init__(
        self,
        environment: str,
        arguments: dict[str, Any] | None = None,
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.environment = environment
        self.arguments = arguments or {}
        self.evaluation = evaluation

    def __repr__(self) -> str:
        return f"VerifiersPrompts({self.environment!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        arguments = json.dumps(self.arguments)
        environment = _load(self.environment, arguments)
        rows = environment.get_eval_dataset() if self.evaluation else environment.get_dataset()
        for number, row in enumerate(rows):
            if not isinstance(row["prompt"], list):
                raise ConfigError(f"{self!r} has text prompts; only chats are supported")
            # Arrow gives every message the fields of all, empty where they are not set.
            chat = [
                {k: v for k, v in message.items() if v is not None} for message in row["prompt"]
            ]
            origin = {"environment": self.environment, "arguments": arguments}
            yield (
                f"{self!r}: row {number}",
                row | {self.prompt_column: chat, "verifiers": origin},
            )


class VerifiersEnvironment(Environment):
    """Runs a row of :class:`VerifiersPrompts` in the environment that it came from.

    The environment's own ``rollout`` runs, on a client that is our model; its rubric gives the
    reward at the end. A rollout that ends by MultiTurn's limits is not graded by it, so give
    ``max_turns`` and ``max_tokens`` that its own limits come before.

    Raises:
        ConfigError: if verifiers is missing, or the environment needs tools.
    """

    def __init__(self, prompt: Prompt) -> None:
        origin = prompt.columns["verifiers"]
        self._environment = _load(origin["environment"], origin["arguments"])
        if self._environment.tool_defs:
            raise ConfigError(
                f"verifiers environment {origin['environment']!r} gives the model tools, which "
                "this adapter does not; use ToolAgent with the functions themselves"
            )
        fields = ("example_id", "answer", "info", "task")
        columns = {name: prompt.columns[name] for name in fields if name in prompt.columns}
        self._input = columns | {"prompt": prompt.prompt}
        # What the environment asks of the model, None at its end; and what the model says.
        self._asked: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._history: list[Any] = []
        self._rollout: asyncio.Task[Any] | None = None

    async def step(self, turn: str) -> Reply:
        if self._rollout is None:
            self._rollout = asyncio.create_task(self._run())
            first = await self._asked.get()
            if first is None:
                return await self._graded(self._rollout)
            self._history = first
        self._said.put_nowait(turn)
        asked = await self._asked.get()
        if asked is None:
            return await self._graded(self._rollout)
        past = len(self._history)
        if asked[:past] != self._history:
            raise ValueError("rewrites what was said before; only chats that grow are supported")
        self._history = asked
        # The message at ``past`` is the model's own.
        return Reply([m.model_dump(exclude_none=True) for m in asked[past + 1 :]])

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})

    async def ask(self, messages: list[Any]) -> str:
        """The model's next turn; called by the environment's client."""
        self._asked.put_nowait(messages)
        return await self._said.get()

    async def _run(self) -> Any:
        try:
            client = _client_class()(self)
            state = await self._environment.rollout(self._input, client, "policy", {})
            if state["error"] is None:
                await self._environment.rubric.score_rollout(state)
            return state
        finally:
            self._asked.put_nowait(None)

    @staticmethod
    async def _graded(rollout: asyncio.Task[Any]) -> Reply:
        state = await rollout
        if state["error"] is not None:
            raise state["error"]
        return Reply(reward=float(state["reward"]), done=True)


@cache
def _load(environment: str, arguments: str) -> Any:
    """The environment object, which all its rollouts share; ``arguments`` as JSON."""
    try:
        from verifiers import load_environment
    except ImportError as error:
        raise ConfigError(
            f"verifiers environment {environment!r} needs `pip install 'verifiers<0.2'`; later "
            "versions have another interface, or cannot be installed beside vLLM"
        ) from error
    try:
        return load_environment(environment, **json.loads(arguments))
    except Exception as error:  # it runs an author's code
        raise ConfigError(f"verifiers environment {environment!r} {arguments}: {error}") from error


@cache
def _client_class() -> Any:
    """A verifiers client that passes every request on to the policy; needs verifiers imported."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class PolicyClient(Client):  # type: ignore[misc, type-arg, unused-ignore]
        """``client`` is the :class:`VerifiersEnvironment` that it belongs to."""

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            raise NotImplementedError("no tools here")

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
            return str(await self.client.ask(prompt))

        async def raise_from_native_response(self, response: str) -> None: ...

        async def from_native_response(self, response: str) -> Any:
            message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model="policy", message=message)

        async def close(self) -> None: ...

    return PolicyClient
