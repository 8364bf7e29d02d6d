"""OpenEnvAgent: plays the environment of an OpenEnv server, by texts or by calls of its tools."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, Environment, Reply, require_seconds
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.agents.templates import ToolParser
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.openenv.running import close, running
from lightning_rl.openenv.server import OpenEnvServer
from lightning_rl.openenv.session import Answer, RefusedAction, Session, current
from lightning_rl.openenv.tools import EpisodeTools, ToolPlayer
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.loop.background import run_async

_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schemas of environments that take calls of their tools as actions."""


@configurable
class OpenEnvAgent(Agent):
    """Plays tasks of :class:`OpenEnvPrompts` in their environment, each in a session of its own.

    If the environment has MCP tools, the model acts by calling them, as with ``ToolAgent``: a turn
    without a call ends the rollout, and calls of the turn that reaches ``max_turns`` are not made.
    Else each turn of the model is an action, as with ``MultiTurn``, and an action that does not fit
    the environment's class of actions is answered by the reason.

    The rewards of the steps sum to the ``environment_reward``; ``calls`` have those of the turns.
    The parts that ``server.reward_fields`` name are logged, and in ``extra`` for reward functions.

    If a server is lost, takes too long or reports an error, the rollout is repeated in a new
    session with the same actions, and FAILED if that fails, too.

    Args:
        server: the environment's server.
        max_turns: maximum number of the model's turns.
        max_turn_tokens: maximum tokens in one turn of an environment without tools; a turn that
            long is over. None: no limit.
        max_seconds: maximum wall time of one rollout; waiting for a place at the server does not
            count. None: no limit.
        parser: reads calls of tools in the model family's format; Hermes by default.
        max_calls_per_turn: how many calls of one turn are made; None: all.
        allow_rewrites: train on chats even if the chat template rewrites earlier turns.

    Raises:
        ConfigError: for values out of range; later if the server cannot be started or reached.
    """

    within_max_tokens = True

    def __init__(
        self,
        server: OpenEnvServer,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        max_seconds: float | None = None,
        parser: ToolParser | None = None,
        max_calls_per_turn: int | None = None,
        allow_rewrites: bool = False,
    ) -> None:
        require_at_least(1, max_turns=max_turns, max_turn_tokens=max_turn_tokens)
        require_seconds(max_seconds)
        self.server = server
        self.limits: dict[str, Any] = {
            "max_turns": max_turns,
            "max_seconds": max_seconds,
            "allow_rewrites": allow_rewrites,
        }
        self.max_turn_tokens = max_turn_tokens
        self.parser = parser
        self.max_calls_per_turn = max_calls_per_turn
        self._player: MultiTurn | ToolAgent | None = None

    @property
    def chat_options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Tells the chat template of the tools; the first access connects to the server."""
        return self._played_by().chat_options

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._played_by().configure(tokenizer)

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        if self._player is None:
            raise ConfigError("OpenEnvAgent has no tokenizer yet; call configure(tokenizer) first")
        reset = rollout.prompt.columns.get("reset")
        if not isinstance(reset, dict):
            raise ConfigError(
                "OpenEnvAgent plays the tasks of OpenEnvPrompts, or of rows with a column `reset`"
            )
        try:
            async with Session.of(self.server) as session:
                self._require_same(rollout.prompt, await session.begin(reset))
                token = current.set(session)
                try:
                    await self._player.run(rollout, engine, sampling)
                finally:
                    current.reset(token)
                    rollout.logged |= session.parts
                    rollout.extra |= session.parts
        except EpisodeError as error:
            rollout.fail(str(error))
        return rollout

    def close(self) -> None:
        """End the server if it was started here; it starts again when needed."""
        if self._player is not None:
            self._player.close()
        close(self.server)

    def _played_by(self) -> MultiTurn | ToolAgent:
        if self._player is None:
            self._player = run_async(self._made())
        return self._player

    async def _made(self) -> MultiTurn | ToolAgent:
        try:
            schema = await running(self.server).here().action_schema()
            if schema.get("title") not in _TOOL_ACTIONS:
                game = partial(OpenEnvGame, self.server.field_of_action(schema))
                return MultiTurn(game, max_turn_tokens=self.max_turn_tokens, **self.limits)
            async with Session.of(self.server) as session:
                listed = (await session.step({"type": "list_tools"})).fields.get("tools")
        except EpisodeError as error:
            raise ConfigError(str(error)) from error
        if not listed:
            raise ConfigError(f"{self.server!r} takes calls of tools as actions, but lists none")
        return ToolPlayer(
            [EpisodeTools(listed)],
            self.parser,
            call_timeout=math.inf,  # the server's answer_seconds limit each
            max_calls_per_turn=self.max_calls_per_turn,
            **self.limits,
        )

    def _require_same(self, prompt: Prompt, first: Answer) -> None:
        """Require that the episode begins as when the prompt was made.

        Raises:
            EpisodeError: with both observations.
        """
        seen = self.server.shown(first.fields)
        known = prompt.columns.get("observation", seen)  # rows of another source may lack it
        if seen != known:
            raise EpisodeError(
                f"{self.server!r} began {prompt.columns['reset']} with {seen!r:.200}, but with "
                f"{known!r:.200} when the prompts were loaded; reset must depend on its arguments "
                "only, such as the seed"
            )


class OpenEnvGame(Environment):
    """The environment of one rollout: each turn of the model is an action with this field."""

    def __init__(self, field: str, prompt: Prompt) -> None:
        self._field = field
        self._session = current.get()

    async def step(self, turn: str) -> Reply:
        try:
            answer = await self._session.step({self._field: turn})
        except RefusedAction as refusal:
            return Reply(f"Error: {refusal}")
        seen = self._session.server.shown(answer.fields)
        return Reply(seen, answer.reward, answer.done)
