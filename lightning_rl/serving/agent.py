"""The base of agents that call their models through a session."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, end, require_seconds
from lightning_rl.agents.endings import ENDING
from lightning_rl.agents.rows import drop_unasked, mask_roles
from lightning_rl.agents.templates import ToolParser
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.rollout import Rollout
from lightning_rl.run.loop.background import cancel_here, run_async
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.results import Ending, note_result
from lightning_rl.serving.server import AgentServer
from lightning_rl.serving.session import Session

_CLOSE_S = 5.0


@configurable
class SessionAgent(Agent):
    """Opens a session of an :class:`AgentServer` for each rollout, in which :meth:`play` runs.

    ``rollout.completion`` becomes the session's transcript. ``finish_reason`` is the last call's,
    or ``max_seconds``. After any other ending the rollout is FAILED with the reason.

    Args:
        roles: names of further models (policies) that may be asked, besides ``policy``.
        parser: reads tool calls in the model family's format.
        client_sampling: whether requests may change sampling settings, such as the temperature.
        max_seconds: maximum wall time of one run, in seconds; None: no limit.
        limits: limits of one request to the models; None: the defaults of :class:`RequestLimits`.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        roles: list[str] | None = None,
        parser: ToolParser | None = None,
        client_sampling: bool = True,
        max_seconds: float | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        require_seconds(max_seconds)
        self.roles = roles or []
        self.parser = parser
        self.client_sampling = client_sampling
        self.max_seconds = max_seconds
        self.limits = limits
        self._server: AgentServer | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the program, for messages."""

    @abstractmethod
    async def play(self, rollout: Rollout, session: Session) -> Ending:
        """Run the agent once; the session records its calls."""

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._server = AgentServer(
            tokenizer,
            parser=self.parser,
            chat_options=self.chat_options,
            client_sampling=self.client_sampling,
            limits=self.limits,
        )

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        self.conclude(rollout, await self.attempt(rollout, engine, sampling))
        return rollout

    async def attempt(
        self,
        rollout: Rollout,
        engine: Engine,
        sampling: Sampling,
        play: Callable[[Rollout, Session], Awaitable[Ending]] | None = None,
    ) -> Ending:
        """Run the agent once in a new session; recorded answers are replayed.

        ``play`` replaces :meth:`play`.

        Raises:
            EngineError: if the engine fails.
        """
        if self._server is None:
            name = type(self).__name__
            raise ConfigError(f"{name} has no tokenizer yet; call configure(tokenizer) first")
        async with self._server.session(rollout, engine, sampling, self.roles) as session:
            try:
                ending = await _until_failure((play or self.play)(rollout, session), session)
            except Exception:
                if session.aborted:  # the agent got an error for it
                    return Ending("abort")
                rollout.extra[ENDING] = "exit"
                raise
            finally:
                rollout.completion = list(session.messages)
        return Ending("abort") if session.aborted else ending

    def conclude(self, rollout: Rollout, ending: Ending) -> None:
        """End a rollout, and record its result."""
        drop_unasked(rollout)
        if ending.completion is not None:
            rollout.completion = ending.completion
        mask_roles(rollout, ending.untrained)
        if ending.kind in ("done", "timeout"):
            ending = _judged(rollout, ending)
        rollout.extra[ENDING] = ending.kind
        if ending.kind == "done":
            end(rollout, rollout.calls[-1].finish_reason)
        elif ending.kind == "timeout":
            rollout.environment_reward = rollout.environment_reward or 0.0
            end(rollout, "max_seconds")
        elif ending.kind == "abort":
            end(rollout, "abort")
        else:
            rollout.fail(f"{self.name} {ending.reason} (prompt {rollout.prompt.id!r})")

    def close(self) -> None:
        """Close the endpoint; it starts again when needed."""
        if self._server is not None:
            with suppress(TimeoutError):  # something blocks the loop: it ends with the process
                run_async(self._server.close(), timeout=_CLOSE_S)


async def _until_failure(playing: Awaitable[Ending], session: Session) -> Ending:
    """Await a run, but stop once the engine has failed; the program itself might wait forever."""
    play = asyncio.ensure_future(playing)
    failed = asyncio.create_task(session.failed.wait())
    try:
        await asyncio.wait([play, failed], return_when=asyncio.FIRST_COMPLETED)
        if not play.done():
            raise EngineError("abandoned because the engine failed")  # the session tells why
        return play.result()
    finally:
        await cancel_here([play, failed])


def _judged(rollout: Rollout, ending: Ending) -> Ending:
    """Record the ending's result, and return the ending; another one if the result is invalid."""
    if not rollout.calls:
        return Ending("silent", "asked no model")
    try:
        note_result(rollout, ending.said)
    except ValueError as error:
        return Ending("result", f"said {error}")
    return ending
