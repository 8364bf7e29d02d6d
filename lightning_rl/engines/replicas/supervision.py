"""Supervision of replicas, which join, die, come back and leave."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.errors import EngineError
from lightning_rl.run.loop.background import cancel_here

_log = logging.getLogger(__name__)
_PATIENCE = 3
"""Failed health checks in a row after which a replica is lost: its machine may be busy."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Seconds between two attempts to bring a replica back."""
_LOOK_S = 0.1
"""Seconds between two checks whether a leaving replica has answered everything."""


class Supervision:
    """Detects lost replicas of an engine, and brings them back. Everything runs in the event loop.

    Args:
        bring_back: restarts or waits for a lost replica, and gives it the weights.
        version: returns the version of the weights that are served.
        health_every_s: seconds between two health checks of a replica.
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
        """The replicas that get requests and weights, alive or not."""
        self.outages = Outages()
        self.changed = asyncio.Event()
        """Set whenever a replica starts or stops serving; whoever waits for it clears it."""
        self.leaving: dict[Replica, asyncio.Task[None]] = {}
        """Replicas that get no more requests, but may still have some in flight."""
        self._watches: dict[Replica, asyncio.Task[None]] = {}

    def watch(self) -> None:
        """Start watching all replicas."""
        for replica in self.replicas:
            self._begin_to_watch(replica)

    def join(self, replica: Replica) -> None:
        """Add a replica, which serves as soon as it answers and holds the weights."""
        self.replicas.append(replica)
        self._begin_to_watch(replica)

    def leave(self, replica: Replica) -> None:
        """Send a replica no more requests or weights, and close it once it has no requests left.

        Requests unanswered when the engine's weights change are generated again elsewhere.
        """
        self.replicas.remove(replica)
        self._watches.pop(replica).cancel()
        self.leaving[replica] = asyncio.create_task(self._see_off(replica))

    def lost(self, replica: Replica, error: Exception) -> None:
        """Mark a replica that did not answer as lost, so that it gets nothing until it is back."""
        self.outages.note(replica, str(error))
        replica.gone.set()
        self.changed.set()

    async def close(self) -> None:
        """Stop watching, and close all replicas."""
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
            "%s has left the engine (unanswered requests: %d); replicas now: %d",
            replica.name, unanswered, len(self.replicas),
        )  # fmt: skip


_TOLD_AGAIN = {10**n for n in range(1, 10)}
"""Counts of equal failures at which the count is logged."""


class Outages:
    """Failures of replicas; equal ones, from all requests and attempts, are counted together."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._since: dict[Replica, Counter[str]] = {}  # each was lost

    def note(self, replica: Replica, why: str) -> None:
        """Record a failure of a replica."""
        self._last[replica.name] = why
        said = self._since.setdefault(replica, Counter())
        said[why] += 1
        if said[why] == 1:
            _log.warning("lost a replica of the engine: %s", why)
        elif said[why] in _TOLD_AGAIN:
            _log.warning("lost a replica of the engine, %d times by now: %s", said[why], why)

    def over(self, replica: Replica) -> None:
        """Record that a replica serves again, or for the first time."""
        failures = self._since.pop(replica, Counter()).total()
        came = "is back" if failures else "has joined the engine"
        _log.warning("%s %s (failures meanwhile: %d)", replica.name, came, failures)

    def __str__(self) -> str:
        """Return the last failure of each replica."""
        return "; ".join(f"{name}: {why}" for name, why in self._last.items()) or "no failure"
