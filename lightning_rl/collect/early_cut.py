"""Collectors that stop a batch early, and what becomes of its slow tail."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from lightning_rl.collect.ahead import WorkingAhead
from lightning_rl.collect.collector import Collector
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.source import Group, GroupSource
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Prompt, RolloutStatus


class PartialCollector(WorkingAhead):
    """Issues more groups than a batch needs, and cuts when the first ones are enough.

    The rest keep their tokens, sleep while the trainer trains, and go on in the next iteration with
    its weights (partial rollouts: Kimi k1.5, Kimi Team 2025, section 2.6.2; APRIL, Zhou et al.
    2025). For an engine that shares its device with the trainer.

    Args:
        over_issue: groups in flight, as a multiple of the batch.
        max_staleness: versions by which a token may be older than the policy that trains on it.

    Raises:
        ConfigError: unless over_issue > 1 and max_staleness >= 1.
    """

    def __init__(self, over_issue: float = 1.5, max_staleness: int = 4) -> None:
        super().__init__(max_staleness)
        require_at_least(1, max_staleness=max_staleness)
        _require_more_than_one(over_issue)
        self.over_issue = over_issue
        self._awake = False  # between batches nothing starts

    async def take(self, pipeline: RolloutPipeline, source: GroupSource, count: int) -> list[Group]:
        await pipeline.engine.resume()
        self._awake = True
        try:
            return await super().take(pipeline, source, count)
        finally:
            self._awake = False
            await pipeline.engine.pause()

    def _allowance(self) -> int:
        return math.ceil(self.over_issue * self._missing) if self._awake else 0

    @asynccontextmanager
    async def yielding(self) -> AsyncIterator[None]:
        async with super().yielding():
            if self._work is not None:
                await self._work[0].engine.resume()  # weights may not have been synced since
            yield


class TailBatchingCollector(Collector):
    """Short rounds take the groups done first; the slow ones' prompts wait for a long round.

    A short round issues more groups than a batch needs and aborts what is not done when the batch
    is full. Once a batch of such prompts has come together, it is generated alone, to its last
    rollout. Every rollout is on-policy (tail batching: RollPacker, Gao et al. 2025).

    Args:
        over_issue: groups in a short round, as a multiple of the batch.

    Raises:
        ConfigError: unless over_issue > 1.
    """

    def __init__(self, over_issue: float = 1.25) -> None:
        super().__init__()
        _require_more_than_one(over_issue)
        self.over_issue = over_issue
        self._tail: deque[Prompt] = deque()

    async def take(self, pipeline: RolloutPipeline, source: GroupSource, count: int) -> list[Group]:
        if len(self._tail) >= count and not self._restored:
            return await self._long_round(pipeline, source, count)
        return await self._short_round(pipeline, source, count)

    async def _long_round(
        self, pipeline: RolloutPipeline, source: GroupSource, count: int
    ) -> list[Group]:
        groups = [source.issue(self._tail.popleft()) for _ in range(count)]
        self._issued |= {group[0].group_id: group for group in groups}
        rollouts = [rollout for group in groups for rollout in group]
        await pipeline.generate(rollouts, source.sampling)
        return groups

    async def _short_round(
        self, pipeline: RolloutPipeline, source: GroupSource, count: int
    ) -> list[Group]:
        groups = [self._next(source) for _ in range(math.ceil(self.over_issue * count))]
        done = await _first_done(pipeline, source, groups, count)
        for group in groups:
            if group[0].group_id not in done:
                self._put_off(group)
        return [group for group in groups if group[0].group_id in done]

    def _put_off(self, group: Group) -> None:
        for rollout in group:
            rollout.status = RolloutStatus.ABORTED
        del self._issued[group[0].group_id]
        self.dropped.append(group)
        self._tail.append(group[0].prompt)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"tail": [asdict(prompt) for prompt in self._tail]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._tail = deque(Prompt(**record) for record in state["tail"])


async def _first_done(
    pipeline: RolloutPipeline, source: GroupSource, groups: list[Group], count: int
) -> set[str]:
    """Generate all until ``count`` are done; ids of those."""
    tasks = {
        asyncio.create_task(pipeline.generate(group, source.sampling)): group for group in groups
    }
    finished: list[Group] = []
    try:
        while len(finished) < count:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what went wrong
                finished.append(tasks.pop(task))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {group[0].group_id for group in finished[:count]}


def _require_more_than_one(over_issue: float) -> None:
    if not 1 < over_issue < math.inf:
        raise ConfigError(
            f"over_issue={over_issue} must be > 1, and finite; 1.25 issues a quarter more"
        )
