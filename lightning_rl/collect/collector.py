"""Collectors: when which group is generated."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.source import Group, GroupSource
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.sync.schedule import CollectorStatus


class Collector(ABC):
    """Turns groups from a source into batches.

    It remembers every group that was issued until ``ack`` says that it became part of a batch:
    what a checkpoint holds, so that no prompt is lost or trained on twice.
    """

    works_between_batches = False
    """Whether it generates while the trainer trains."""

    def __init__(self) -> None:
        self._issued: dict[str, Group] = {}
        self._restored: list[Group] = []
        self.dropped: list[Group] = []
        """Groups that were cut since this list was last emptied; their prompts are kept."""

    @abstractmethod
    async def take(self, pipeline: RolloutPipeline, source: GroupSource, count: int) -> list[Group]:
        """The next ``count`` generated groups, for iteration ``source.iteration``.

        What works ahead grades its groups too, as they are done.

        Raises:
            EngineError: if the engine fails.
        """

    def ack(self, groups: list[Group]) -> None:
        """These groups, that ``take`` returned, are in a batch (or rejected by a filter)."""
        for group in groups:
            del self._issued[group[0].group_id]

    async def status(self) -> CollectorStatus:
        """Where it stands between two batches; one that does not work ahead has nothing."""
        return CollectorStatus()

    async def before_sync(self) -> None:
        """Called before the engine's weights change."""

    async def after_sync(self) -> None:
        """Called when they have."""

    @asynccontextmanager
    async def yielding(self) -> AsyncIterator[None]:
        """While an evaluation has the engine."""
        yield

    async def close(self) -> None:
        """Stop what is in flight. It stays in the state, and comes first if a run goes on."""
        self._restored = [*self._issued.values(), *self._restored]
        self._issued = {}

    def metrics(self) -> dict[str, float]:
        """What it has in hand when a batch is complete."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All groups that are not in a batch yet, with what they have so far; primitives only.

        Every value is a list, whose items another number of ranks may share.
        """
        groups = [*self._issued.values(), *self._restored]
        return {"groups": [[rollout.to_dict() for rollout in group] for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Finish those groups first; what could not be graded is graded again."""
        self._restored = [
            [_retried(Rollout.from_dict(record)) for record in group] for group in state["groups"]
        ]

    def issue(self, source: GroupSource) -> Group:
        """A restored group, or a new one; from now on remembered."""
        group = self._restored.pop(0) if self._restored else source.next()
        self._issued[group[0].group_id] = group
        return group


@configurable
class SyncCollector(Collector):
    """Generates the whole batch, and returns when its last rollout is done.

    Args:
        max_concurrency: rollouts in flight at most; None: all (the engine queues them).
    """

    def __init__(self, max_concurrency: int | None = None) -> None:
        super().__init__()
        require_at_least(1, max_concurrency=max_concurrency)
        self.max_concurrency = max_concurrency

    async def take(self, pipeline: RolloutPipeline, source: GroupSource, count: int) -> list[Group]:
        groups = [self.issue(source) for _ in range(count)]
        rollouts = [rollout for group in groups for rollout in group]
        await pipeline.generate(rollouts, source.sampling, self.max_concurrency)
        return groups


def _retried(rollout: Rollout) -> Rollout:
    if rollout.status is not RolloutStatus.FAILED:
        return rollout
    if rollout.finish_reason is None:  # what its agent left behind may be why it failed
        rollout.clear()
    else:
        rollout.status = RolloutStatus.COMPLETED
    rollout.error = None
    rollout.reward_parts = {}
    return rollout
