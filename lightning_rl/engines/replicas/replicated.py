"""ReplicatedEngine: several engine processes as one engine, any of which may die."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config import names
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine, ReplicaStatus, RunState
from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost, Timeouts
from lightning_rl.engines.replicas.supervision import Supervision
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm.forms import weight_shapes
from lightning_rl.errors import EngineError, ReplicaError, SyncTimeoutError, require_at_least
from lightning_rl.run.loop.background import run_async

OUR_TRANSFER = "lightning_rl"
"""The weight transfer that most transports use; ``options`` may name one of vLLM's own."""

_ATTEMPTS = 4
"""Replicas that one request may lose before it is considered the cause."""


@configurable
class ReplicatedEngine(Engine):
    """Spreads requests over replicas, and survives the death of any of them.

    A request goes to the replica with the fewest in flight. When a replica dies, hangs or is
    unreachable, its requests are generated again on another one, from their prompts and with their
    seeds. If we started the replica, it is restarted; otherwise it is waited for. It gets the
    weights of the last push before it serves again. No request is answered twice, and none by
    weights other than ``version``.

    Args:
        recovery_timeout_s: how long requests wait for a replica when all are lost.
        health_every_s: seconds between two health checks of a replica.
        start_timeout_s: time limit until a replica answers; in Ray, also for its resources.
        request_timeout_s: time limit of one completion; a slower replica counts as lost.
        call_timeout_s: time limit of any other call, such as pausing.

    Raises:
        ConfigError: if any of them is below 0.1.
    """

    serves_all_ranks = True
    transfer_backend = OUR_TRANSFER

    def __init__(
        self,
        recovery_timeout_s: float = 900.0,
        health_every_s: float = 5.0,
        start_timeout_s: float = 600.0,
        request_timeout_s: float = 1800.0,
        call_timeout_s: float = 60.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)  # of the class beside this one, if there is one
        require_at_least(
            0.1,
            recovery_timeout_s=recovery_timeout_s,
            health_every_s=health_every_s,
            start_timeout_s=start_timeout_s,
            request_timeout_s=request_timeout_s,
            call_timeout_s=call_timeout_s,
        )
        self.recovery_timeout_s = recovery_timeout_s
        self.health_every_s = health_every_s
        self._timeouts = Timeouts(start_timeout_s, request_timeout_s, call_timeout_s)
        self.shapes: dict[str, torch.Size] = {}
        self.refill: Callable[[Replica], None] | None = None
        """Set by a transport that can give a restarted replica the weights of the last push."""
        self.supervision = Supervision(self._bring_back, lambda: self.version, health_every_s)
        self._running = False
        self._paused = False
        self._weights_ready = asyncio.Event()  # unset while weights change
        self._weights_ready.set()

    # ---------------------------------------------------------------- life

    @abstractmethod
    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        """Return replicas that are not started yet."""

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that get requests and weights, alive or not."""
        return self.supervision.replicas

    @property
    def running(self) -> bool:
        return self._running

    def start(self, model_dir: Path) -> None:
        """Start all replicas at the same time.

        Raises:
            ReplicaError: if one does not start; all are stopped then.
        """
        if self._running:
            return
        self.shapes = weight_shapes(model_dir)
        self.start_with(self._make_replicas(model_dir))

    def start_with(self, replicas: list[Replica]) -> None:
        """Start these replicas, for weights of :attr:`shapes`.

        Raises:
            ReplicaError: if one does not start; all are stopped then.
        """
        self.supervision.replicas = replicas
        self._running = True
        try:
            run_async(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for replica in self.replicas:
                    starting.create_task(replica.start())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled for it
        self.supervision.watch()

    def close(self) -> None:
        was_running, self._running = self._running, False
        self.version = -1
        if was_running:
            run_async(self._close())

    async def _close(self) -> None:
        await self.supervision.close()

    # ---------------------------------------------------------------- generation

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        self.require_ready()
        self.require_room(len(token_ids), sampling)
        lost = 0
        while lost < _ATTEMPTS:
            replica = await self._pick_replica()
            replica.load += 1
            try:
                return await _ask(replica, token_ids, sampling, seed)
            except (ReplicaLost, SyncTimeoutError) as error:
                lost += replica in self.replicas  # else it was told to leave
                if replica.alive:  # and nobody has noted it yet
                    self.lost(replica, error)
            finally:
                replica.load -= 1
        raise EngineError(
            f"a request of {len(token_ids)} tokens lost {_ATTEMPTS} replicas in succession; the "
            f"last failure: {self.supervision.outages}"
        )

    async def _pick_replica(self) -> Replica:
        """Return the serving replica with the fewest requests; wait if there is none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.recovery_timeout_s
        while True:
            if not self._weights_ready.is_set():
                await self._weights_ready.wait()
                deadline = loop.time() + self.recovery_timeout_s
            self.require_ready()  # a push may have failed
            serving = [r for r in self.replicas if r.alive and r.version == self.version]
            if serving:
                return min(serving, key=lambda replica: replica.load)
            self.supervision.changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self.supervision.changed.wait()
            except TimeoutError as error:
                raise ReplicaError(
                    f"none of {len(self.replicas)} replicas came back within recovery_timeout_s="
                    f"{self.recovery_timeout_s:g}: {self.supervision.outages}"
                ) from error

    @property
    def in_flight(self) -> int:
        return sum(replica.load for replica in [*self.replicas, *self.supervision.leaving])

    @property
    def paused(self) -> bool:
        return self._paused or not self._weights_ready.is_set()

    def replica_states(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(replica.name, self._state_of(replica), replica.version, replica.load)
            for replica in self.replicas
        ]

    def _state_of(self, replica: Replica) -> RunState:
        if not replica.alive:
            return RunState.STOPPED
        serves = self.version >= 0 and replica.version == self.version
        return RunState.RUNNING if serves and not self.paused else RunState.WAITING

    async def pause(self) -> None:
        self._paused = True
        await self._on_each_alive(lambda replica: replica.pause())

    async def resume(self) -> None:
        self._paused = False
        if self.version < 0:  # a push failed: nothing may be generated with what is left of it
            return
        await self._on_each_alive(lambda replica: replica.resume())

    async def _on_each_alive(self, act: Callable[[Replica], object]) -> None:
        """Act on all live replicas, and record those that die."""

        async def one(replica: Replica) -> None:
            try:
                await act(replica)  # type: ignore[misc]
            except (ReplicaLost, SyncTimeoutError) as error:
                self.lost(replica, error)

        await asyncio.gather(*(one(replica) for replica in self.replicas if replica.alive))

    # ---------------------------------------------------------------- deaths

    def lost(self, replica: Replica, error: Exception) -> None:
        """Mark a replica that did not answer as lost until it is back. Call it in the loop."""
        self.supervision.lost(replica, error)

    async def _bring_back(self, replica: Replica) -> None:
        """Restart a replica or wait for it, and give it the weights of the last push."""
        await replica.start()
        if self._paused:
            await replica.pause()
        elif not replica.can_restart:  # the same process, which a push may have paused
            await replica.resume()
        if self.refill is not None:
            await asyncio.to_thread(self.refill, replica)

    # ---------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        # A push through memory, for those who use an engine without a transport. Transports know
        # engines, not the other way round: so by its name.
        transport = names.public("MemoryTransport")()
        transport.connect(self)
        try:
            transport.push(weights, version)
        finally:
            transport.close()

    def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        serving = [r for r in self.replicas if r.alive and r.version == self.version]
        return self.held_digests_of(serving, names)

    def held_digests_of(
        self, replicas: Sequence[Replica], names: Sequence[str]
    ) -> list[HeldDigests]:
        """Return what the replicas' workers hold; record and leave out those that die."""
        result: list[HeldDigests] = []

        async def ask(replica: Replica) -> None:
            try:
                result.extend(await replica.held_digests(names))
            except (ReplicaLost, SyncTimeoutError) as error:
                self.lost(replica, error)

        async def ask_all() -> None:
            await asyncio.gather(*(ask(replica) for replica in replicas))

        run_async(ask_all())
        return result

    @contextmanager
    def taking_weights(self, version: int) -> Iterator[list[Replica]]:
        """Hold requests and pause replicas while weights change; yield the live replicas.

        If the body raises, the engine has no valid version until the next push.
        """
        if not self._running:
            raise EngineError(f"{type(self).__name__} is not running; call start() first")
        run_async(self._pause_for_weights())
        try:
            yield [replica for replica in self.replicas if replica.alive]
            self.version = version
        except BaseException:
            self.version = -1
            raise
        finally:
            run_async(self._resume_after_weights())

    async def _pause_for_weights(self) -> None:
        self._weights_ready.clear()
        if not self._paused:
            await self._on_each_alive(lambda replica: replica.pause())

    async def _resume_after_weights(self) -> None:
        if not self._paused:
            await self.resume()
        self._weights_ready.set()
        self.supervision.changed.set()


async def _ask(
    replica: Replica, token_ids: Sequence[int], sampling: Sampling, seed: int
) -> Completion:
    """Return a replica's answer; raise if it is lost first, as a vanished machine never tells."""
    request = asyncio.ensure_future(replica.generate(token_ids, sampling, seed))
    gone = asyncio.ensure_future(replica.gone.wait())
    try:
        await asyncio.wait((request, gone), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            raise ReplicaLost(f"{replica.name} was lost while generating")
        return request.result()
    finally:
        request.cancel()
        gone.cancel()
