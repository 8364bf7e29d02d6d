"""StreamedCollector: lets the trainer work on complete groups while the others are generated."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from lightning_rl.collect.collector import Collector
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least
from lightning_rl.rollout import Group, Rollout
from lightning_rl.run.loop.background import cancel_here, innermost


class Consumer(Protocol):
    """Works on complete groups, in the thread that waits for the batch."""

    first: frozenset[int]
    """Places of the groups to generate first."""

    def begin(self, count: int) -> None:
        """Prepare for a batch of ``count`` groups on each rank."""

    def add(self, groups: Sequence[tuple[int, Group]]) -> None:
        """Work on groups, given with their places in the batch."""

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of the final batch, in its order."""


@configurable
class StreamedCollector(Collector):
    """Generates a batch, and lets the trainer work on complete groups meanwhile.

    Weights change only after the whole batch, so all rollouts are on-policy, and the update equals
    that of ``SyncCollector`` up to rounding (StreamRL, Zhong et al. 2025; RollPacker, Gao et al.
    2025). Prompts and seeds also equal those of ``SyncCollector``.

    Args:
        max_groups_in_flight: groups generated concurrently; None: all. If all completions have
            similar lengths, all groups are complete only at the end; fewer are faster then.
        engine_threads: threads for an in-process engine meanwhile, while the trainer has the
            others; None: half. With one thread each has one, and needs a core of its own.
    """

    def __init__(
        self, max_groups_in_flight: int | None = None, engine_threads: int | None = None
    ) -> None:
        super().__init__()
        require_at_least(1, max_groups_in_flight=max_groups_in_flight)
        require_at_least(1, engine_threads=engine_threads)
        self.max_groups_in_flight = max_groups_in_flight
        self.engine_threads = engine_threads
        self._groups: list[Group] = []
        self._tasks: dict[asyncio.Task[None], int] = {}  # by place
        self._complete: list[int] = []
        self._progress = asyncio.Event()

    async def begin(self, count: int, first: frozenset[int] = frozenset()) -> list[Group]:
        """Start the next ``count`` groups, those at the places ``first`` before the others."""
        self.pipeline.engine.require_ready()
        self._groups = [self.issue() for _ in range(count)]
        self._complete, self._progress = [], asyncio.Event()
        gate = asyncio.Semaphore(self.max_groups_in_flight or count)
        for index in sorted(range(count), key=lambda index: index not in first):
            task = asyncio.create_task(self._finish_in_turn(self._groups[index], gate))
            self._tasks[task] = index
            task.add_done_callback(self._on_done)
        return self._groups

    async def complete(self) -> list[int]:
        """Wait for groups that are complete and not yet reported; return their places, [] at the
        end.

        It also returns [] once a group has failed; :meth:`take` then raises the error.
        """
        while not self._complete and not self._over():
            self._progress.clear()
            await self._progress.wait()
        indices, self._complete = self._complete, []
        return indices

    async def take(self, count: int) -> list[Group]:
        groups = self._groups or await self.begin(count)
        try:
            await asyncio.gather(*self._tasks)
        except Exception as error:
            await self._cancel()
            raise innermost(error) from None
        self._groups, self._tasks = [], {}
        return groups

    async def evict(self, taken: list[Group]) -> list[Group]:
        await self._cancel()
        return await super().evict(taken)

    async def close(self) -> None:
        await self._cancel()
        await super().close()

    async def _finish_in_turn(self, group: Group, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self.pipeline.generate([group], self.source.sampling)
        await self.pipeline.rewards.grade_ahead([group])

    def _over(self) -> bool:
        done = [task for task in self._tasks if task.done()]
        return len(done) == len(self._tasks) or any(_failed(task) for task in done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._progress.set()
        if task in self._tasks and not _failed(task):
            self._complete.append(self._tasks[task])

    async def _cancel(self) -> None:
        tasks, self._groups, self._tasks = self._tasks, [], {}
        await cancel_here(tasks)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
