"""Collectors that end a batch early, and treat its slow rollouts in different ways."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lightning_rl.collect.collector import Collector
from lightning_rl.collect.prefetch import PrefetchingCollector
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Group, Prompt, RolloutStatus, primitives
from lightning_rl.run.loop.background import cancel_here


@configurable
class PartialCollector(PrefetchingCollector):
    """Issues more groups than a batch needs, and stops as soon as enough of them are complete.

    The others keep their tokens, are paused while the trainer trains, and continue in the next
    iteration with its weights (partial rollouts: Kimi k1.5, Kimi Team 2025, section 2.6.2; APRIL,
    Zhou et al. 2025). Use it for an engine that shares its device with the trainer.

    Args:
        over_issue: groups in flight, as a multiple of the batch size.
        max_staleness: maximum number of versions by which a token may be older than the policy that
            trains on it.

    Raises:
        ConfigError: unless over_issue > 1 and max_staleness >= 1.
    """

    def __init__(self, over_issue: float = 1.5, max_staleness: int = 4) -> None:
        super().__init__(max_staleness)
        require_at_least(1, max_staleness=max_staleness)
        _require_more_than_one(over_issue)
        self.over_issue = over_issue
        self._awake = False  # between batches nothing starts

    async def take(self, count: int) -> list[Group]:
        await self.pipeline.engine.resume()
        self._awake = True
        try:
            return await super().take(count)
        finally:
            self._awake = False
            await self.pipeline.engine.pause()

    def _allowance(self) -> int:
        return math.ceil(self.over_issue * self._missing) if self._awake else 0

    @asynccontextmanager
    async def yielding(self) -> AsyncIterator[None]:
        async with super().yielding():
            if self._active:
                await self.pipeline.engine.resume()  # weights may not have been synced since
            yield


@configurable
class PartialTailCollector(PartialCollector):
    """Partial rollouts (:class:`PartialCollector`), where slow groups get a batch of their own.

    A group that was carried over to the next iteration ``candidate_step`` times belongs to the
    tail. When ``trigger_size`` groups do, the next batch waits for them, and issues no more groups
    than its size; so they no longer compete with new groups, and end before they become too stale.

    Args:
        over_issue: groups in flight in other iterations, as a multiple of the batch size.
        max_staleness: maximum number of versions by which a token may be older than the policy that
            trains on it.
        trigger_size: number of tail groups that triggers such a batch; None: the batch size.
        candidate_step: how often a group is carried over before it counts as slow.

    Raises:
        ConfigError: unless over_issue > 1, trigger_size >= 1 and 1 <= candidate_step <=
            max_staleness.
    """

    def __init__(
        self,
        over_issue: float = 1.5,
        max_staleness: int = 4,
        trigger_size: int | None = None,
        candidate_step: int = 1,
    ) -> None:
        super().__init__(over_issue, max_staleness)
        require_at_least(1, trigger_size=trigger_size, candidate_step=candidate_step)
        if candidate_step > max_staleness:
            raise ConfigError(
                f"candidate_step={candidate_step} must be <= max_staleness={max_staleness}, since "
                "no group is carried over more often; lower it, or raise max_staleness"
            )
        self.trigger_size = trigger_size
        self.candidate_step = candidate_step
        self._tail: set[str] = set()  # ids of the groups that this batch waits for

    async def take(self, count: int) -> list[Group]:
        slow = {
            group[0].group_id
            for group in (*self._done, *self._running.values())
            if self._age(group, self.source.iteration) >= self.candidate_step
        }
        self._tail = slow if len(slow) >= (self.trigger_size or count) else set()
        return await super().take(count)

    def _age(self, group: Group, iteration: int) -> int:
        """Return the number of iterations since the weights that wrote the group's first tokens."""
        return iteration - (self._deadline_of(group) - self.max_staleness)

    def _allowance(self) -> int:
        return self._missing if self._awake and self._tail else super()._allowance()

    def _ready(self, count: int) -> bool:
        # They have the earliest deadlines, so of what is done they are taken first.
        done = sum(group[0].group_id in self._tail for group in self._done)
        return done >= min(count, len(self._tail)) and super()._ready(count)


@configurable
class TailBatchingCollector(Collector):
    """Short rounds keep the groups that finish first; the prompts of slow ones get a long round.

    A short round issues more groups than a batch needs and aborts the unfinished ones when the
    batch is full. When enough prompts have been postponed, their groups are generated without any
    others, until the last rollout is complete. Every rollout is on-policy (tail batching:
    RollPacker, Gao et al. 2025).

    Args:
        over_issue: groups in a short round, as a multiple of the batch size.
        trigger_size: number of slow prompts that triggers a long round, which new prompts fill up
            if they are fewer than a batch; None: the batch size.
        candidate_step: how often a prompt is postponed before it counts as slow; until then it is
            issued again in the next short round.

    Raises:
        ConfigError: unless over_issue > 1, and trigger_size and candidate_step >= 1.
    """

    def __init__(
        self,
        over_issue: float = 1.25,
        trigger_size: int | None = None,
        candidate_step: int = 1,
    ) -> None:
        super().__init__()
        _require_more_than_one(over_issue)
        require_at_least(1, trigger_size=trigger_size, candidate_step=candidate_step)
        self.over_issue = over_issue
        self.trigger_size = trigger_size
        self.candidate_step = candidate_step
        self._tail: deque[Prompt] = deque()
        self._again: deque[tuple[Prompt, int]] = deque()  # put off so many times, not slow yet
        self._put_off_before: dict[str, int] = {}  # of groups of this round

    async def take(self, count: int) -> list[Group]:
        long = len(self._tail) >= (self.trigger_size or count) and not self._restored
        groups = await (self._long_round(count) if long else self._short_round(count))
        self._put_off_before.clear()
        return groups

    async def _long_round(self, count: int) -> list[Group]:
        slow = min(count, len(self._tail))
        groups = [self._issue_again(self._tail.popleft()) for _ in range(slow)]
        groups += [self._next_or_again() for _ in range(count - slow)]
        await self.pipeline.generate(groups, self.source.sampling)
        return groups

    async def _short_round(self, count: int) -> list[Group]:
        groups = [self._next_or_again() for _ in range(math.ceil(self.over_issue * count))]
        done = await self._first_done(groups, count)
        for group in groups:
            if group[0].group_id not in done:
                self._put_off(group)
        return [group for group in groups if group[0].group_id in done]

    async def _first_done(self, groups: list[Group], count: int) -> set[str]:
        """Generate all groups until ``count`` are complete; return the ids of those."""
        tasks = {
            asyncio.create_task(self.pipeline.generate([group], self.source.sampling)): group
            for group in groups
        }
        finished: list[Group] = []
        try:
            while len(finished) < count:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task in done]:  # in the order of issue
                    task.result()  # raises what went wrong
                    finished.append(tasks.pop(task))
        finally:
            await cancel_here(tasks)
        return {group[0].group_id for group in finished[:count]}

    def _next_or_again(self) -> Group:
        if self._restored or not self._again:
            return self.issue()
        prompt, times = self._again.popleft()
        group = self._issue_again(prompt)
        self._put_off_before[group[0].group_id] = times
        return group

    def _issue_again(self, prompt: Prompt) -> Group:
        return self._remember(self.source.issue(prompt))

    def _put_off(self, group: Group) -> None:
        self._drop(group, RolloutStatus.ABORTED)
        prompt, times = group[0].prompt, self._put_off_before.get(group[0].group_id, 0) + 1
        if times >= self.candidate_step:
            self._tail.append(prompt)
        else:
            self._again.append((prompt, times))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "tail": [primitives(prompt) for prompt in self._tail],
            "again": [[primitives(prompt), times] for prompt, times in self._again],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._tail = deque(Prompt(**record) for record in state["tail"])
        self._again = deque((Prompt(**record), times) for record, times in state.get("again", []))


def _require_more_than_one(over_issue: float) -> None:
    if not 1 < over_issue < math.inf:
        raise ConfigError(
            f"over_issue={over_issue} must be > 1 and finite; 1.25 issues a quarter more groups"
        )
