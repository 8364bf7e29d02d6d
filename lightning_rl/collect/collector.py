"""Collectors decide when each group is generated; filters, which groups are worth training on."""

import asyncio
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.config.arguments import configurable
from lightning_rl.data.rollouts.validation import whole
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.rollout import Group, Rollout, RolloutStatus, own
from lightning_rl.run.loop.background import cancel_here, innermost, require_awaited
from lightning_rl.sync.schedule import CollectorStatus


class Refill(Protocol):
    """Says which groups of a batch need a replacement, and until when one may be generated."""

    def rejects(self, group: Group) -> bool:
        """Tell if a filter rejects this group; False if it is not graded yet."""

    def may_refill(self, drawn: int) -> bool:
        """Tell if a replacement may begin now, after so many groups since the last ``take``."""

    def seconds_to_evict(self) -> float:
        """Return the seconds after which replacements still being generated are given up."""


class Collector(ABC):
    """Turns groups from a source into batches.

    It remembers every issued group until ``ack`` says that the group became part of a batch. This
    is what a checkpoint holds, so that no prompt is lost or trained on twice.

    ``pipeline`` (generates and grades), ``source`` (issues groups) and ``refill`` (says which
    groups need a replacement; None: none does) belong to the current run.
    """

    works_between_batches = False
    """True if it generates while the trainer trains."""

    pipeline: RolloutPipeline
    source: GroupSource
    refill: Refill | None

    def __init__(self) -> None:
        self._issued: dict[str, Group] = {}
        self._restored: list[Group] = []
        self.dropped: list[Group] = []
        """Groups that were cut since this list was last emptied; their prompts are kept."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.take)
        try:
            signature.bind("self", "count")
        except TypeError as error:
            raise ConfigError(
                f"{cls.__name__}.take{signature} must have the signature take(self, count); use "
                "self.pipeline and self.source, and call self.issue() without arguments"
            ) from error

    def bind(
        self, pipeline: RolloutPipeline, source: GroupSource, refill: Refill | None = None
    ) -> None:
        """Store the parts of a run; called before its first batch.

        With ``refill``, filters may reject groups, and ``take`` may return replacements for them.
        """
        self.pipeline, self.source, self.refill = pipeline, source, refill

    @abstractmethod
    async def take(self, count: int) -> list[Group]:
        """Return the next ``count`` generated groups, for iteration ``self.source.iteration``.

        A collector that prefetches also grades its groups as soon as they are complete.

        Raises:
            EngineError: if the engine fails.
        """

    def issue(self) -> Group:
        """Return a restored group, or a new one, and remember it as issued."""
        require_awaited()  # to tokenise the prompts of many groups takes a while
        return self._remember(self._restored.pop(0) if self._restored else self.source.next())

    def _remember(self, group: Group) -> Group:
        self._issued[group[0].group_id] = group
        return group

    async def _finish(self, group: Group, gate: asyncio.Semaphore | None = None) -> None:
        """Generate a group that was issued, and grade it as soon as it is complete."""
        await self.pipeline.generate([group], self.source.sampling, gate)
        await self.pipeline.rewards.grade_ahead([group])

    def _drop(self, group: Group, status: RolloutStatus) -> None:
        """Give up a group that was issued, with this status, and that nobody works on any more."""
        for rollout in group:
            rollout.status = status
        self._issued.pop(group[0].group_id, None)
        self.dropped.append(group)

    def _expire(self, group: Group) -> None:
        """Give up such a group; its prompt is issued again."""
        self._drop(group, RolloutStatus.EXPIRED)
        self.source.give_back(group[0].prompt)

    async def evict(self, taken: list[Group]) -> list[Group]:
        """Give up the unfinished groups of a cancelled ``take``, and return the finished ones.

        These are all issued groups except those that were already ``taken``.
        """
        kept = {group[0].group_id for group in taken}
        finished: list[Group] = []
        for group in [g for name, g in self._issued.items() if name not in kept]:
            if any(rollout.status is RolloutStatus.INIT for rollout in group):
                self._expire(group)
            else:
                finished.append(group)
        # Nothing is generated any more, but completions are decoded.
        await self.pipeline.generate(finished, self.source.sampling, growing=False)
        return finished

    def ack(self, groups: list[Group]) -> None:
        """Forget groups that ``take`` returned: they are in a batch, or a filter rejected them."""
        for group in groups:
            del self._issued[group[0].group_id]

    async def status(self) -> CollectorStatus:
        """Return the collector's progress between two batches; empty unless it prefetches."""
        return CollectorStatus()

    async def before_sync(self) -> None:
        """Prepare for a change of the engine's weights."""

    async def after_sync(self) -> None:
        """Continue with the new weights."""

    @asynccontextmanager
    async def yielding(self) -> AsyncIterator[None]:
        """Leave the engine to an evaluation for the duration of this context."""
        yield

    async def close(self) -> None:
        """Stop all generation in progress. It stays in the state, and comes first if a run
        continues.
        """
        self._restored = [*self._issued.values(), *self._restored]
        self._issued = {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the groups in progress when a batch is complete."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all groups that are not in a batch yet, with their tokens so far, as primitives.

        Every value is a list, whose items can be redistributed over another number of ranks.
        """
        return {"groups": [_records(g) for g in (*self._issued.values(), *self._restored)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Finish these groups first; rollouts that could not be graded are graded again."""
        self._restored = [
            [
                _retried(rollout)
                for rollout in map(Rollout.from_dict, map(whole, _each(group)))
                if not _is_lost(rollout)
            ]
            for group in state["groups"]
        ]


def _records(group: Group) -> list[dict[str, Any]]:
    """Return a record per rollout; for a group that has not begun, one record with all ``seeds``.

    When a run is interrupted, nearly all of the 100,000 groups of a batch may not have begun.
    """
    first = group[0]
    new = Rollout(first.prompt, first.group_id, 0, 0, first.sampling, structured=first.structured)
    for new.sample_index, rollout in enumerate(group):
        new.seed = rollout.seed
        if rollout != new:
            return [each.to_dict() for each in group]
    return [first.to_dict() | {"seeds": [rollout.seed for rollout in group]}]


def _each(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a record per rollout, from the output of :func:`_records`."""
    for record in records:
        if "seeds" not in record:
            yield record
        for index, seed in enumerate(record.get("seeds", ())):
            yield own(record) | {"sample_index": index, "seed": seed}


def _is_lost(rollout: Rollout) -> bool:
    """Return True for a branch whose agent failed; the rollout it branched off from repeats it."""
    failed = rollout.status is RolloutStatus.FAILED and rollout.finish_reason is None
    return failed and rollout.fork is not None


def _retried(rollout: Rollout) -> Rollout:
    if rollout.status is not RolloutStatus.FAILED:
        return rollout
    if rollout.finish_reason is None:  # what its agent left behind may be why it failed
        rollout.clear()
    else:
        rollout.status = RolloutStatus.COMPLETED
    rollout.error = None
    rollout.extra.pop("traceback", None)
    rollout.reward_parts = {}
    return rollout


@configurable
class SyncCollector(Collector):
    """Generates the whole batch, and returns when its last rollout is done.

    Args:
        max_concurrency: maximum rollouts in flight; None: all (the engine queues them).
    """

    def __init__(self, max_concurrency: int | None = None) -> None:
        super().__init__()
        require_at_least(1, max_concurrency=max_concurrency)
        self.max_concurrency = max_concurrency

    async def take(self, count: int) -> list[Group]:
        if self.refill is not None:
            return await self._take_and_refill(count, self.refill)
        groups = [self.issue() for _ in range(count)]
        await self.pipeline.generate(groups, self.source.sampling, self.max_concurrency)
        return groups

    async def _take_and_refill(self, count: int, refill: Refill) -> list[Group]:
        """Issue a group more for each that is rejected, without waiting for the others.

        The first of all issued groups that filters keep are the same in whatever order they end.
        """
        gate = asyncio.Semaphore(self.max_concurrency or sys.maxsize)
        groups: dict[asyncio.Task[None], Group] = {}

        def begin() -> asyncio.Task[None]:
            group = self.issue()
            task = asyncio.create_task(self._finish(group, gate))
            groups[task] = group
            return task

        first = {begin() for _ in range(count)}
        running = set(first)
        try:
            while running:
                seconds = math.inf if running & first else refill.seconds_to_evict()
                limit = None if seconds == math.inf else max(0.0, seconds)
                done, running = await asyncio.wait(
                    running, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    task.result()  # raises what went wrong
                    if refill.rejects(groups[task]) and refill.may_refill(len(groups)):
                        running.add(begin())
        except Exception as error:
            raise innermost(error) from None
        finally:
            await cancel_here(running)
        for group in [group for task, group in groups.items() if task in running]:
            self._expire(group)
        return [group for task, group in groups.items() if task not in running]


class GroupFilter(ABC):
    """Keeps or rejects a graded group; rejected ones are replaced by groups of new prompts.

    ``min_group_size`` is the smallest group that the filter can keep.
    """

    min_group_size: ClassVar[int] = 1

    @abstractmethod
    def keep(self, group: Sequence[Rollout]) -> bool:
        """Decide whether to train on this group."""


@configurable
@dataclass(frozen=True)
class RewardSpread(GroupFilter):
    """Rejects groups whose rewards are all equal: they have no advantage (DAPO, section 3.2).

    Args:
        min_spread: the largest reward minus the smallest must exceed this.
        part: name of the reward part to compare, such as an exact reward combined with shaped ones,
            which may differ within a group that is all wrong; None: the total reward.

    Raises:
        ConfigError: if ``min_spread`` is negative or not finite, or rewards have no such part.
    """

    min_group_size: ClassVar[int] = 2

    min_spread: float = 0.0
    part: str | None = None

    def __post_init__(self) -> None:
        require_finite(min_spread=self.min_spread)
        require_at_least(0, min_spread=self.min_spread)

    def keep(self, group: Sequence[Rollout]) -> bool:
        found = [self._reward(rollout) for rollout in group if rollout.completed]
        rewards = [reward for reward in found if reward is not None]
        return bool(rewards) and max(rewards) - min(rewards) > self.min_spread

    def _reward(self, rollout: Rollout) -> float | None:
        if self.part is None or rollout.reward is None:
            return rollout.reward
        if self.part not in rollout.reward_parts:
            raise ConfigError(
                f"RewardSpread(part={self.part!r}): rewards have no part of that name; use one of "
                f"{', '.join(rollout.reward_parts)}"
            )
        return rollout.reward_parts[self.part]
