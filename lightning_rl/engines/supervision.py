"""Who serves: replicas join, die, come back and leave."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from lightning_rl.engines.outages import Outages
from lightning_rl.engines.replica import Replica, ReplicaLost
from lightning_rl.errors import EngineError
from lightning_rl.run.loop import cancel_here

_log = logging.getLogger(__name__)
_PATIENCE = 3
"""Looks in a row at which a replica must be silent to count as lost: the machine may be busy."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Between two attempts to bring a replica back."""
_LOOK_S = 0.1
"""Between two looks at whether one that leaves has answered all."""


class Supervision:
    """Notices the deaths of an engine's replicas, and brings them back. All of it is in the loop.

    Args:
        bring_back: starts one that is not alive, or waits for it, and gives it the weights.
        version: says the version of the weights that are served.
        health_every_s: seconds between two looks at a replica's health.
    """

    def __init__(
        self,
        bring_back: Callable[[Replica], Awaitable[None]],
        version: Callable[[], int],
        health_every_s: float,
    ) -> None:
        self._bring_back, self._version = bring_back, version
        self._health_every_s = health_every_s
        self.replicas: list[Replica] = []
        """Those that requests and weights are for, alive or not."""
        self.outages = Outages()
        self.changed = asyncio.Event()
        """Set whenever a replica has begun or ceased to serve; who waits for that clears it."""
        self.leaving: dict[Replica, asyncio.Task[None]] = {}
        """They get no requests any more, and may have some in flight."""
        self._watches: dict[Replica, asyncio.Task[None]] = {}

    def watch(self) -> None:
        """All, from now on."""
        for replica in self.replicas:
            self._begin_to_watch(replica)

    def join(self, replica: Replica) -> None:
        """A further replica: it serves as soon as it answers and holds the weights."""
        self.replicas.append(replica)
        self._begin_to_watch(replica)

    def leave(self, replica: Replica) -> None:
        """Give it no more requests and weights, and close it once it has answered what it has.

        What it has not answered when the engine's weights change is generated again elsewhere.
        """
        self.replicas.remove(replica)
        self._watches.pop(replica).cancel()
        self.leaving[replica] = asyncio.create_task(self._see_off(replica))

    def lost(self, replica: Replica, error: Exception) -> None:
        """A replica did not answer: send it nothing until it is back."""
        self.outages.note(replica, str(error))
        replica.gone.set()
        self.changed.set()

    async def close(self) -> None:
        """Watch no longer, and close all."""
        await cancel_here([*self._watches.values(), *self.leaving.values()])
        replicas = [*self.replicas, *self.leaving]
        self.replicas = []
        self._watches.clear()
        self.leaving.clear()
        await asyncio.gather(*(replica.close() for replica in replicas))

    def _begin_to_watch(self, replica: Replica) -> None:
        self._watches[replica] = asyncio.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        wait = _FIRST_WAIT_S
        while True:
            await self._wait_until_lost(replica)
            replica.version = -1
            try:
                await self._bring_back(replica)
            except EngineError as error:
                self.lost(replica, error)
            if replica.alive:
                wait = _FIRST_WAIT_S
                self.outages.over(replica)
                self.changed.set()
            else:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)

    async def _wait_until_lost(self, replica: Replica) -> None:
        silent = 0
        while replica.alive:
            try:
                async with asyncio.timeout(self._health_every_s):
                    await replica.gone.wait()
            except TimeoutError:
                silent = 0 if await replica.answers() else silent + 1
                if silent == _PATIENCE:
                    self.lost(replica, ReplicaLost(f"{replica.name} does not answer"))

    async def _see_off(self, replica: Replica) -> None:
        version = self._version()
        while replica.load and replica.alive and self._version() == version:
            await asyncio.sleep(_LOOK_S)
        unanswered = replica.load
        await replica.close()
        del self.leaving[replica]
        _log.warning(
            "%s has left the engine (requests that it had not answered: %d); replicas now: %d",
            replica.name, unanswered, len(self.replicas),
        )  # fmt: skip
