"""Play an environment by its MCP tools: each call is a step of the rollout's episode."""

import math
from typing import Any

from lightning_rl.agents.tools import ToolAgent, ToolServer
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import EpisodeError
from lightning_rl.openenv.session import RefusedAction, current
from lightning_rl.rollout import Rollout


class EpisodeTools(ToolServer):
    """The tools of an environment, which are called in the session of the rollout.

    Args:
        tools: the tools, as the environment lists them.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._tools = tools

    def tools(self) -> list[Any]:
        return [self.served(t["name"], t["description"], t["input_schema"]) for t in self._tools]

    def close(self) -> None:
        """Do nothing: sessions are closed with their rollouts."""

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        session = current.get()
        if session.done:
            raise RuntimeError("the episode has ended")
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            fields = (await session.step(call)).fields
        except RefusedAction as refusal:
            raise RuntimeError(str(refusal)) from refusal
        if error := fields.get("error"):
            raise RuntimeError(error["message"])
        return _result(fields.get("result"))


class ToolPlayer(ToolAgent):
    """A ``ToolAgent`` whose tools are an environment's, which pays for calls and ends episodes."""

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        session = current.get()
        await self._repeat(rollout)
        await super().run(rollout, engine, sampling)
        rollout.environment_reward = math.fsum(session.rewards)
        for call, paid in zip(rollout.calls, session.turns, strict=False):
            call.reward = paid
        return rollout

    def ends_after_calls(self) -> bool:
        session = current.get()
        session.end_turn()
        return session.done

    async def _repeat(self, rollout: Rollout) -> None:
        """Make the calls of an interrupted rollout again, as its session is a new one."""
        messages = [] if isinstance(rollout.completion, str) else rollout.completion
        for place, message in enumerate(messages):
            calls = message.get("tool_calls", [])
            before = messages[place + 1 : place + 1 + len(calls)]
            if not before:
                continue
            now = await self.toolbox.answer(calls, self.max_calls_per_turn)
            current.get().end_turn()
            if [reply["content"] for reply in now] != [reply["content"] for reply in before]:
                raise EpisodeError(
                    f"the tools answered {calls!r:.200} of a resumed rollout with {now!r:.200}, "
                    f"but before with {before!r:.200}; they must depend on the seed only"
                )


def _result(result: Any) -> Any:
    """Return the result of a tool: the text, if it is MCP's list of content parts.

    Raises:
        RuntimeError: with the tool's own message, if it reports an error.
    """
    if not (isinstance(result, dict) and isinstance(result.get("content"), list)):
        return result
    text = "\n".join(part.get("text", str(part)) for part in result["content"])
    if result.get("is_error"):
        raise RuntimeError(text or "the tool gave no reason")
    return text
