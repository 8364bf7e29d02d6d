"""Replica: an engine in another process, which generates tokens and receives weights."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import (
    DamagedWeightsError,
    EngineError,
    IncompleteWeightsError,
    ReplicaError,
    StaleWeightsError,
    SyncTimeoutError,
    WeightSyncError,
)

_log = logging.getLogger(__name__)
_TAIL = "', please check"
HEALTH_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Timeouts(NamedTuple):
    """Time limits in seconds: until a replica answers, of a completion, and of any other call."""

    start: float
    request: float
    call: float


class ReplicaLost(ReplicaError):
    """A replica did not answer; another one may."""


class Replica(ABC):
    """One of an engine's processes. Its methods run in the background event loop.

    The weight methods are vLLM's weight-transfer API, with the backend that
    :mod:`lightning_rl.sync.vllm_worker` registers.
    """

    can_restart: bool
    """True if we started it, and so can restart it."""
    workers: int = 1
    """Number of its processes that receive weights (tensor parallel)."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        """Name used in messages."""
        self.host = host
        """The machine that it runs on."""
        self.version = -1
        """Version of its weights; -1: they are not the trainer's."""
        self.life = 0
        """Counts its starts: connections to an earlier life are no longer valid."""
        self.load = 0
        """Number of requests in flight."""
        self.gone = asyncio.Event()
        """Set while it does not answer."""
        self.gone.set()

    @property
    def alive(self) -> bool:
        return not self.gone.is_set()

    @property
    def on_this_machine(self) -> bool:
        """True if the engine can open this process's files under ``/proc``."""
        return self.host in LOOPBACK

    @abstractmethod
    async def start(self) -> None:
        """Restart it if we started it; wait until it answers.

        Raises:
            ReplicaError: if it does not answer in time.
        """

    @abstractmethod
    async def answers(self) -> bool:
        """Return whether it is healthy."""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """Continue ``token_ids``.

        Raises:
            ReplicaLost: if it dies during the call.
            SyncTimeoutError: if it takes longer than the limit for a completion.
            EngineError: if it refuses.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop between two tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after :meth:`pause`."""

    @abstractmethod
    async def transfer(self, step: str, timeout_s: float, **arguments: Any) -> Mapping[str, Any]:
        """Do one step of a push: call a method of vLLM's weight-transfer API.

        Raises:
            ReplicaLost: if it dies during the call.
            SyncTimeoutError: if it takes longer.
            WeightSyncError: if it refuses; the class is the one that the worker raised.
        """

    async def begin(self, timeout_s: float) -> None:
        """Begin a push, even if the previous one was interrupted.

        Raises:
            ReplicaLost: if it dies during the call.
            SyncTimeoutError: if it takes longer.
        """
        try:
            await self.transfer("start_weight_update", timeout_s)
        except (ReplicaLost, SyncTimeoutError):
            raise
        except EngineError:
            await self._abort_update(timeout_s)
            await self.transfer("start_weight_update", timeout_s)

    async def _abort_update(self, timeout_s: float) -> None:
        """Make vLLM abort a push by a step that always fails."""
        try:
            await self.transfer("update_weights", timeout_s, update_info={})
        except (ReplicaLost, SyncTimeoutError):
            raise
        except EngineError as expected:
            _log.info("%s: the previous push was aborted (%s)", self.name, expected)

    @abstractmethod
    async def set_version(self, version: int, timeout_s: float) -> None:
        """End a push: drop caches of old weights, and check that it reports ``version``.

        Raises:
            StaleWeightsError: if it reports another version.
        """

    def _require_version(self, said: object, version: int) -> None:
        if str(said) != str(version):
            raise StaleWeightsError(
                f"{self.name} reports version {said} after a push of version {version}"
            )

    async def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        """Return what each of its workers holds under these names; empty if it cannot tell.

        Raises:
            ReplicaLost: if it dies during the call.
            SyncTimeoutError: if it takes longer than the limit for a call.
        """
        return []

    def _held_digests(self, answers: Sequence[Mapping[str, Any]]) -> list[HeldDigests]:
        """Turn its workers' answers, by rank, into held digests."""
        return [
            HeldDigests(f"{self.name}, rank {rank}" if len(answers) > 1 else self.name, **answer)
            for rank, answer in enumerate(answers)
        ]

    @abstractmethod
    async def close(self) -> None:
        """Free everything, and end the process if we started it."""


def worker_error(name: str, text: str) -> WeightSyncError | None:
    """Rebuild, from its text, the error that a worker raised in a push; None if there is none."""
    for kind in (
        IncompleteWeightsError,
        DamagedWeightsError,
        SyncTimeoutError,
        WeightSyncError,
    ):
        _, found, message = text.partition(f"{kind.__name__}: ")
        if found:
            # vLLM wraps it in "Worker failed with error '...', please check the stack trace above".
            return kind(f"{name}: {message.partition(chr(34))[0].partition(_TAIL)[0]}")
    return None
