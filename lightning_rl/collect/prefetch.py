"""Collectors that keep groups in flight from one batch to the next."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from lightning_rl.collect.collector import Collector
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, EngineError, require_at_least
from lightning_rl.rollout import Group, RolloutStatus
from lightning_rl.run.loop.background import cancel_here, innermost
from lightning_rl.sync.schedule import CollectorStatus


class PrefetchingCollector(Collector):
    """Groups are generated and graded one by one; batches are made of those that are done.

    No token that is trained on in iteration ``n`` is older than version ``n - max_staleness``. Each
    group has a deadline: the last iteration that may train on it. A group is only issued if, with
    ``num_groups`` a batch, all deadlines can be met; and a batch waits for groups that would miss
    theirs in a later one. So nothing is thrown away for being stale, however long it takes.

    With ``abort_stale`` a batch waits only for groups whose prompt was aborted before. Others that
    miss their deadline are aborted at once, and their prompts are issued again.

    Args:
        max_staleness: versions by which a token may be older than the policy that trains on it.
    """

    abort_stale = False

    def __init__(self, max_staleness: int) -> None:
        super().__init__()
        require_at_least(0, max_staleness=max_staleness)
        self.max_staleness = max_staleness
        self._running: dict[asyncio.Task[None], Group] = {}
        self._given_up: set[asyncio.Task[None]] = set()  # that have not ended yet
        self._done: list[Group] = []
        self._deadline: dict[str, int] = {}
        self._restarted: set[str] = set()  # keys of prompts whose group was given up
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        self._active = False  # from the first batch of a run on, until it is closed
        self._batch = 0  # the iteration whose batch is being made
        self._missing = 0  # groups that this batch still lacks
        self._yielding = False

    # ---------------------------------------------------------------- batches

    async def take(self, count: int) -> list[Group]:
        """``count`` groups that are done; those with the earliest deadline first.

        Raises:
            ConfigError: if weights are synced too seldom for ``max_staleness``.
            EngineError: if the engine fails.
        """
        self.pipeline.engine.require_ready()
        self._active = True
        self._batch, self._missing = self.source.iteration, count
        while True:
            self._progress.clear()
            self._fill()
            if self._failure is not None:
                raise self._failure
            if self._ready(count):
                break
            version = self.pipeline.engine.version
            if not self._running and version >= 0:  # else a push is under way
                raise self._stuck(version)
            await self._progress.wait()
        taken, self._done = self._done[:count], self._done[count:]
        self._missing = 0
        return taken

    async def evict(self, taken: list[Group]) -> list[Group]:
        """Return what is done, and give up what only this batch may train on; the rest goes on."""
        done, self._done = self._done[: self._missing], self._done[self._missing :]
        self._missing = 0
        await cancel_here(self._expire_due(self._batch))
        return done

    def _expire_due(self, iteration: int) -> list[asyncio.Task[None]]:
        """Abort what no iteration after this one may train on; return the tasks that this ends.

        A group that is being graded is not interrupted, since a plain function cannot be, and runs
        one call at a time; what it gives is not used.
        """

        def is_due(group: Group) -> bool:
            return self._deadline_of(group) <= iteration

        tasks = [task for task, group in self._running.items() if is_due(group)]
        for group in filter(is_due, self._done):
            self._expire(group)
        self._done = [group for group in self._done if group[0].group_id in self._deadline]
        aborted = []
        for task in tasks:
            group = self._running.pop(task)
            # At once its prompt may be issued again. The rest waits for the task's end, which may
            # be under way, and would make something else of the rollouts.
            del self._issued[group[0].group_id]
            self._forget(group)
            self._given_up.add(task)
            task.add_done_callback(partial(self._mark_aborted, group))
            if any(rollout.status is RolloutStatus.INIT for rollout in group):
                task.cancel()
                aborted.append(task)
        return aborted

    def _mark_aborted(self, group: Group, task: asyncio.Task[None]) -> None:
        self._given_up.discard(task)
        self._drop(group, RolloutStatus.EXPIRED)

    def _expire(self, group: Group) -> None:
        self._drop(group, RolloutStatus.EXPIRED)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        """Let the prompt of a group that is given up be issued again."""
        self._deadline.pop(group[0].group_id, None)
        self._restarted.add(group[0].prompt.key)
        self.source.give_back(group[0].prompt)

    def ack(self, groups: list[Group]) -> None:
        super().ack(groups)
        for group in groups:
            self._deadline.pop(group[0].group_id)
            self._restarted.discard(group[0].prompt.key)
        self._expire_due(self._batch)  # only with abort_stale there is anything
        self._batch, self._missing = self._batch + 1, self.source.num_groups
        self._fill_or_fail()

    def _ready(self, count: int) -> bool:
        """Tell if the first ``count`` done groups may go without making others miss deadlines."""
        self._done.sort(key=lambda group: (self._may_abort(group), self._deadline_of(group)))
        taken, left = self._done[:count], [*self._done[count:], *self._running.values()]
        waited = [group for group in left if not self._may_abort(group)]
        in_time = not self._running or all(
            self._due(iteration, waited) <= self._slots(iteration, missing=0)
            for iteration in self._horizon()
        )
        return len(taken) == count and in_time

    def _may_abort(self, group: Group) -> bool:
        """Tell if a batch need not wait for it: only once, so that long rollouts count too."""
        return self.abort_stale and group[0].prompt.key not in self._restarted

    def _fits(self, deadline: int) -> bool:
        """Tell if one more group with this deadline leaves a place in time for every group."""
        groups = [*self._done, *self._running.values()]
        return all(
            self._due(iteration, groups) < self._slots(iteration, self._missing)
            for iteration in self._horizon()
            if iteration >= deadline
        )

    def _horizon(self) -> range:
        return range(self._batch, self._batch + self.max_staleness + 1)

    def _slots(self, iteration: int, missing: int) -> int:
        """Places in all batches up to this iteration; the current one has ``missing``."""
        return missing + (iteration - self._batch) * self.source.num_groups

    def _due(self, iteration: int, groups: list[Group]) -> int:
        return sum(self._deadline_of(group) <= iteration for group in groups)

    def _deadline_of(self, group: Group) -> int:
        return self._deadline[group[0].group_id]

    @abstractmethod
    def _allowance(self) -> int:
        """Most groups that may be in flight or waiting, for all the collector cares."""

    # ---------------------------------------------------------------- groups in flight

    def _fill(self) -> None:
        """Issue as many groups as may be, those of a checkpoint first."""
        if not self._active or self._yielding or self._failure is not None:
            return
        version = self.pipeline.engine.version
        if version < 0:  # weights are being pushed, by the trainer's thread
            return
        newest = version + self.max_staleness
        while len(self._running) + len(self._done) < min(self._allowance(), self._to_come()):
            if self._restored:
                group = self.issue()
                deadline = _oldest_version(group, default=version) + self.max_staleness
                if deadline < self._batch or not self._fits(deadline):
                    self._expire(group)
                    continue
            elif newest >= self._batch and self._fits(newest):
                group, deadline = self.issue(), newest
            else:
                return
            self._deadline[group[0].group_id] = deadline
            task = asyncio.get_running_loop().create_task(self._finish(group))
            self._running[task] = group
            task.add_done_callback(self._on_done)

    def _to_come(self) -> float:
        """Groups that the run can still train on."""
        last = self.source.iterations()
        return math.inf if last is None else self._slots(last - 1, self._missing)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        group = self._running.pop(task, None)
        self._progress.set()
        error = None if task.cancelled() else task.exception()  # asked for, or Python warns
        if task.cancelled() or group is None:
            return
        if error is not None:
            # The first is the cause. The group stays among those issued, for another run.
            self._failure = self._failure or innermost(error)
            return
        self._done.append(group)
        self._fill_or_fail()

    def _fill_or_fail(self) -> None:
        """For callbacks of the loop, whose errors nobody hears: ``take`` raises them."""
        try:
            self._fill()
        except Exception as failure:
            self._failure = failure
            self._progress.set()

    def _stuck(self, version: int) -> Exception:
        if self._yielding:
            return EngineError("a batch was asked for while an evaluation had the engine")
        return ConfigError(
            f"iteration {self._batch + 1} may train on no token older than version "
            f"{self._batch - self.max_staleness}, but the engine holds version {version}; sync "
            f"more often (WeightSync's schedule), or raise max_staleness={self.max_staleness}"
        )

    # ---------------------------------------------------------------- around it

    async def status(self) -> CollectorStatus:
        if not self._active:
            return CollectorStatus(closed=True)
        newest = self.pipeline.engine.version + self.max_staleness
        return CollectorStatus(
            in_flight=len(self._running),
            done=len(self._done),
            wanted=self.source.num_groups,
            may_issue=newest >= self._batch and self._fits(newest),
            # Groups in hand may go on: their deadlines are no later than that of a new one.
            used_up=newest < self._batch,
        )

    async def after_sync(self) -> None:
        self._fill()
        self._progress.set()  # for a batch that is awaited while weights are pushed

    @asynccontextmanager
    async def yielding(self) -> AsyncIterator[None]:
        """Nothing new is issued meanwhile."""
        self._yielding = True
        try:
            yield
        finally:
            self._yielding = False
            self._fill()

    async def close(self) -> None:
        tasks, self._running = self._running, {}
        await cancel_here([*tasks, *self._given_up])
        await super().close()
        self._done, self._deadline, self._missing = [], {}, 0
        self._active, self._failure = False, None
        self._progress = asyncio.Event()  # another run may have another loop

    def state_dict(self) -> dict[str, Any]:
        restarted = {"restarted": sorted(self._restarted)} if self.abort_stale else {}
        return super().state_dict() | restarted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._restarted = set(state.get("restarted", ()))

    def metrics(self) -> dict[str, float]:
        return {
            "collect/in_flight": float(len(self._running)),
            "collect/waiting": float(len(self._done)),
        }


def _oldest_version(group: Group, default: int) -> int:
    return min((v for rollout in group for v in rollout.written_versions()), default=default)


@configurable
class AsyncCollector(PrefetchingCollector):
    """Keeps the engine busy while the trainer trains (AReaL, Fu et al. 2025, section 5.1).

    Rollouts in flight when weights are synced go on with the new ones, and say for each token which
    version wrote it. With ``max_staleness=0`` nothing is generated ahead: that is
    ``SyncCollector``, but for the order of groups.

    Args:
        max_staleness: versions by which a token may be older than the policy that trains on it.
        max_groups_in_flight: groups generated at the same time; None: as many as staleness allows.
        abort_stale: abort groups in flight that have become too stale for the next batch, and
            issue their prompts again, instead of waiting for them. A prompt's second group is
            always waited for.
    """

    works_between_batches = True

    def __init__(
        self,
        max_staleness: int = 1,
        max_groups_in_flight: int | None = None,
        abort_stale: bool = False,
    ) -> None:
        super().__init__(max_staleness)
        require_at_least(1, max_groups_in_flight=max_groups_in_flight)
        self.max_groups_in_flight = max_groups_in_flight
        self.abort_stale = abort_stale

    def _allowance(self) -> int:
        if self.max_groups_in_flight is None:
            return 2**62
        return self.max_groups_in_flight + len(self._done)


class OneStepOffCollector(AsyncCollector):
    """Generates the next batch while the trainer trains on this one (one-step off-policy).

    Weights change only when that batch is done, so every rollout is of a single version, exactly
    one behind from the second iteration on (Noukhovitch et al. 2024, "Asynchronous RLHF").
    """

    def __init__(self) -> None:
        super().__init__(max_staleness=1)

    async def before_sync(self) -> None:
        while self._running and self._failure is None:
            await asyncio.wait(list(self._running))
