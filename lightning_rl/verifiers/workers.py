"""The workers of an environment: shared by all its users, and restarted when they die."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from lightning_rl.run.loop.background import run_async
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.worker import Worker


class Workers:
    """Up to ``count`` workers of one environment; they start when needed, and restart if they die.

    Args:
        hosting: the environment that they host.
    """

    count = 1

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self._workers: list[Worker] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._alone = asyncio.Lock()
        self._single: Worker | None = None
        self._waiting = 0  # for the single one, or asking it

    async def seats(self) -> list[str]:
        """Return the names of the environment's players."""
        return (await self._least_busy()).seats

    async def ask(self, max_seconds: float | None = None, **order: Any) -> dict[str, Any]:
        """Send an order to the least busy worker, with a time limit.

        Raises:
            WorkerError: if the order failed.
            WorkerDied: if the worker ended before it answered.
            TimeoutError: if it took longer; waiting for a worker does not count.
        """
        return await _within(max_seconds, (await self._least_busy()).ask(**order))

    async def ask_alone(self, max_seconds: float | None = None, **order: Any) -> dict[str, Any]:
        """Send an order to a worker that does nothing else meanwhile.

        This repeats orders that were under way when a worker died, so that only the order that
        kills its worker is lost. Raises the errors of :meth:`ask`.
        """
        self._waiting += 1
        try:
            async with self._alone:
                if self._single is None or not self._single.alive:
                    await self._end_single()
                    self._single = Worker(self.hosting)
                    await self._single.start()
                return await _within(max_seconds, self._single.ask(**order))
        finally:
            self._waiting -= 1
            if not self._waiting:
                await self._end_single()

    async def close(self) -> None:
        """Stop all workers; they start again when needed."""
        workers, self._workers = self._workers, []
        await asyncio.gather(self._end_single(), *(worker.close() for worker in workers))

    async def _end_single(self) -> None:
        single, self._single = self._single, None
        if single is not None:
            await single.close()

    async def _least_busy(self) -> Worker:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first time, or after another loop was given up
            self._loop, self._workers, self._single, self._waiting = loop, [], None, 0
            self._starting, self._alone = asyncio.Lock(), asyncio.Lock()
        async with self._starting:
            dead = [worker for worker in self._workers if not worker.alive]
            self._workers = [worker for worker in self._workers if worker.alive]
            await asyncio.gather(*(worker.close() for worker in dead))
            idle = any(worker.load == 0 for worker in self._workers)
            if not self._workers or (not idle and len(self._workers) < self.count):
                worker = Worker(self.hosting)
                await worker.start()
                self._workers.append(worker)
            return min(self._workers, key=lambda worker: worker.load)


async def _within(seconds: float | None, asked: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    async with asyncio.timeout(seconds):
        return await asked


_shared: dict[str, Workers] = {}


def workers_of(hosting: Hosting, count: int = 1) -> Workers:
    """Return the workers of an environment, one shared set per hosting: they are slow to start."""
    workers = _shared.setdefault(hosting.key, Workers(hosting))
    workers.count = max(count, workers.count)
    return workers


def close_workers(hosting: Hosting) -> None:
    """Stop the workers of an environment, if there are any."""
    if (workers := _shared.pop(hosting.key, None)) is not None:
        run_async(workers.close())
