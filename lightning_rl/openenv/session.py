"""One episode in a session of an OpenEnv server, repeated in another one if that is lost."""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lightning_rl.errors import EpisodeError
from lightning_rl.openenv.running import Running, ServerLost, running
from lightning_rl.openenv.server import OpenEnvServer
from lightning_rl.run.loop.background import cancel_here
from lightning_rl.run.retry import retry

_LARGEST = 100 * 2**20
"""Maximum bytes of an answer, as in OpenEnv's own client."""
_CLOSE_S = 1.0
"""Seconds for the server to free a session's place; it may hang."""
_CONNECTS = 3
"""Attempts to open a session, after the first."""


class RefusedAction(EpisodeError):
    """An action does not fit the environment's class of actions, which is the model's fault."""


@dataclass(frozen=True)
class Answer:
    """What an environment answers: an observation's fields, a reward, and whether it is done."""

    fields: dict[str, Any]
    reward: float
    done: bool
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)
    """The model does not read it (OpenEnv 0.10), and it may differ in a repeated episode."""


class Session:
    """An episode at a server, which :meth:`of` opens: :meth:`begin`, then :meth:`step` by step.

    What a lost server, one that took too long, or an environment that raised should have answered
    is asked once more, in a new session in which the episode is repeated up to there.
    """

    def __init__(self, server: OpenEnvServer, used: Running) -> None:
        self.server = server
        self.done = False
        self.rewards: list[float] = []
        """The reward of each step."""
        self.turns: list[float] = []
        """The reward of each turn that :meth:`end_turn` has ended."""
        self.parts = defaultdict[str, float](float)
        """The parts of the reward by name, summed over the steps."""
        self._running = used
        self._past: list[tuple[dict[str, Any], Answer]] = []
        self._in_turn = asyncio.Lock()
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._said: asyncio.Queue[str | None] = asyncio.Queue()

    @classmethod
    @asynccontextmanager
    async def of(cls, server: OpenEnvServer) -> AsyncIterator["Session"]:
        """Wait for a place at the server, and hold it with a session."""
        async with (used := running(server).here()).places:
            session = cls(server, used)
            try:
                yield session
            finally:
                await session.close()

    async def begin(self, arguments: dict[str, Any]) -> Answer:
        """Begin the episode with the arguments of the environment's ``reset``.

        Raises:
            EpisodeError: if that failed twice.
        """
        return await self._ask({"type": "reset", "data": arguments})

    async def step(self, action: dict[str, Any]) -> Answer:
        """Do an action; several at a time are done in the order in which they are asked.

        Raises:
            RefusedAction: if it does not fit the class of actions.
            EpisodeError: if it failed twice, or the answer is malformed.
        """
        answer = await self._ask({"type": "step", "data": action})
        self.rewards.append(answer.reward)
        for name, value in self.server.reward_parts(answer.metadata | answer.fields).items():
            self.parts[name] += value
        return answer

    def end_turn(self) -> None:
        """Note that the next step belongs to another turn of the model."""
        self.turns.append(math.fsum(self.rewards) - math.fsum(self.turns))

    async def _ask(self, message: dict[str, Any]) -> Answer:
        async with self._in_turn:
            try:
                answer = await self._once(message)
            except ServerLost as lost:
                answer = await self._again(message, lost)
            self._past.append((message, answer))
            self.done = answer.done
            return answer

    async def _again(self, message: dict[str, Any], lost: ServerLost) -> Answer:
        await self.close()
        async with self._running.alone:
            try:
                for asked, before in self._past:
                    if (now := await self._once(asked)) != before:
                        raise EpisodeError(
                            f"{self.server!r} answered {json.dumps(asked):.80} of a repeated "
                            f"episode with {now!r:.200}, but before with {before!r:.200}; it must "
                            "depend on the arguments of reset, such as the seed, and actions only"
                        )
                return await self._once(message)
            except ServerLost as again:
                raise EpisodeError(f"{again} (twice; at first: {lost})") from again

    async def _once(self, message: dict[str, Any]) -> Answer:
        if self._socket is None:
            try:
                await retry(self._open, retries=_CONNECTS, on=(ServerLost,))
            except ServerLost as error:
                raise EpisodeError(f"{error} ({_CONNECTS + 1} attempts)") from error
        assert self._socket is not None
        limit = self.server.answer_seconds
        try:
            async with asyncio.timeout(limit):
                await self._socket.send_json(message)
                said = await self._said.get()
        except TimeoutError:
            raise ServerLost(f"{self.server!r} gave no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError):
            said = None
        if said is None:
            await self._running.await_end()
            end = self._running.how_it_ended()
            raise ServerLost(f"{self.server!r} closed the connection{end}")
        return self._read(said)

    async def _open(self) -> None:
        await self.close()
        url = f"{await self._running.url()}/ws"
        self._client = self._running.connections()
        self._said = asyncio.Queue()
        try:
            self._socket = await self._client.ws_connect(url, max_msg_size=_LARGEST)
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            raise self._running.unreachable(url, error) from error
        # Somebody must read, or the server's pings stay unanswered while the model writes.
        self._reading = asyncio.create_task(_listen(self._socket, self._said))

    async def close(self) -> None:
        """Close the connection; the next question opens another."""
        socket, client, reading = self._socket, self._client, self._reading
        self._socket = self._client = self._reading = None
        if socket is not None and reading is not None:
            with suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(_CLOSE_S):
                    await socket.send_json({"type": "close"})
                    await reading  # until the server has freed the session's place
            await cancel_here([reading])
        if client is not None:
            await client.close()

    def _read(self, said: str) -> Answer:
        """Read an answer as the server sends it.

        Raises:
            RefusedAction: if the action does not fit.
            ServerLost: if the environment raised, or the server has no place.
            EpisodeError: if the answer is malformed.
        """
        try:
            message = json.loads(said)
            data = message["data"]
            if message["type"] != "error":
                return _answer(data)
            told, code, reasons = data["message"], data["code"], _reasons(data.get("errors", []))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise EpisodeError(
                f"{self.server!r} sent a malformed observation: {error!r:.200} in {said:.200}"
            ) from error
        if code == "VALIDATION_ERROR":
            raise RefusedAction(reasons or told)
        if code == "CAPACITY_REACHED":
            raise ServerLost(
                f"{self.server!r} has no place: {told}; lower sessions={self.server.sessions}, or "
                "raise max_concurrent_envs of the server's app"
            )
        raise ServerLost(f"{self.server!r} raised: {told}")


current: ContextVar[Session] = ContextVar("current")
"""The session of the rollout that is being played."""


async def _listen(
    socket: aiohttp.ClientWebSocketResponse, said: "asyncio.Queue[str | None]"
) -> None:
    """Deliver the server's texts, and None at the end of the connection."""
    try:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:  # such as one that is too long
                break
            said.put_nowait(message.data)
    finally:
        said.put_nowait(None)


def _answer(data: Any) -> Answer:
    fields, reward, done = data["observation"], data.get("reward"), data.get("done", False)
    if not isinstance(fields, dict):
        raise TypeError("observation must be an object")
    if not isinstance(metadata := fields.pop("metadata", None), dict | None):
        raise TypeError(f"metadata={metadata!r:.80} must be an object or null")
    if not isinstance(reward, bool | int | float | None) or not math.isfinite(reward or 0):
        raise TypeError(f"reward={reward!r:.80} must be a finite number or null")
    if not isinstance(done, bool):
        raise TypeError(f"done={done!r:.80} must be true or false")
    return Answer(fields, float(reward or 0), done, metadata or {})


def _reasons(errors: Any) -> str:
    """Return what is wrong with an action, from pydantic's list of errors."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors)
