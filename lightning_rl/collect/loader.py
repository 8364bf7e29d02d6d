"""Batches of graded groups, and Lightning's view of them: one batch per RL iteration."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

from lightning.pytorch import Trainer
from tensordict import TensorDict

from lightning_rl.collect.collector import Collector, GroupFilter
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline, in_groups
from lightning_rl.collect.stats import rollout_metrics
from lightning_rl.collect.streamed import Consumer, StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.rollouts.form import upgraded
from lightning_rl.engines.base import RunState, drives_engine
from lightning_rl.errors import FilterError, RewardError
from lightning_rl.rollout import Group, Prompt, Rollout, RolloutStatus
from lightning_rl.run import dist
from lightning_rl.run.cores import beside_engine
from lightning_rl.run.loop import run_async, runtime


class Resumable(Protocol):
    """Something that a checkpoint can hold, and any number of ranks go on from."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_shares(self, states: Sequence[dict[str, Any]], /) -> None: ...


class RolloutLoader:
    """A sized plain iterable that collects lazily.

    Plain, because Lightning then collects after ``on_train_epoch_start`` in every epoch, never
    prefetches, and keeps ``state_dict`` in its checkpoints. The state holds the source's, the place
    in the epoch, and rollouts that were collected but not trained on yet.

    Args:
        collect: called with the iteration's number; returns its graded rollouts.
        source: what ``collect`` draws on; its state is part of the loader's.
        length: iterations per epoch, as Lightning is told.
        epoch: how many of them the Trainer's own limits leave; None: all.
        trained: tells how many iterations have been trained on.
        roles: in the order of their numbers in a batch; see :func:`pack_rollouts`.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        source: Resumable,
        length: int,
        trained: Callable[[], int],
        epoch: int | None = None,
        roles: Sequence[str] = (),
    ) -> None:
        self._roles = roles
        self._collect = collect
        self._source = source
        self._length = length
        self._epoch = length if epoch is None else epoch
        self._trained = trained
        self.first = trained()  # a second fit goes on counting, and so with other seeds
        self._collected = self.first
        self._place = 0  # iterations of this epoch that were handed out
        self._current: list[Rollout] = []  # what was handed out last
        self._due = 0  # trained on, once this many iterations are
        self._restored: list[Rollout] = []  # from a checkpoint, to be handed out first

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        # Lightning takes as many batches as the length says, and leaves the iterator at its last
        # yield. So an epoch's end is tidied up here, at the start of the next.
        self._place %= self._epoch
        while self._place < self._epoch:
            with dist.every_rank():
                self._current = self._restored or self._collect_next()
                self._restored = []
                batch = pack_rollouts(trainable(self._current), self._current, self._roles)
            self._place += 1
            self._due = self._trained() + 1
            yield batch

    def _collect_next(self) -> list[Rollout]:
        rollouts = self._collect(self._collected)
        self._collected += 1
        return rollouts

    @property
    def current(self) -> list[Rollout]:
        """The rollouts that the last batch was made of, and those it left out."""
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's loader, since one rank writes the checkpoint; primitives only.

        An iteration that was cut short, in either half, is still to come.
        """
        return {"ranks": dist.gather(self._own_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, first with the rollouts that were pending then.

        If there were more ranks, or fewer, their rollouts are dealt out anew, group by group.
        """
        shares = state["ranks"]
        self._source.load_shares([share["source"] for share in shares])
        # These are the same on all ranks.
        self.first, self._collected = shares[0]["first"], shares[0]["collected"]
        self._place = shares[0]["place"]
        groups = dist.reshard(
            [_in_groups(share["pending"]) for share in shares], dist.rank(), dist.world_size()
        )
        self._restored = [Rollout.from_dict(upgraded(r)) for group in groups for r in group]

    def _own_state(self) -> dict[str, Any]:
        untrained = bool(self._current) and self._trained() < self._due
        pending = self._restored or (self._current if untrained else [])
        return {
            "source": self._source.state_dict(),
            "first": self.first,
            "collected": self._collected,
            "place": self._place - 1 if pending and not self._restored else self._place,
            "pending": [r.to_dict() for r in pending],
        }


def limited_epoch(trainer: Trainer, length: int) -> int:
    """Count an epoch's iterations that ``limit_train_batches`` and ``overfit_batches`` leave."""
    limit = trainer.limit_train_batches
    return min(limit, length) if isinstance(limit, int) else int(length * limit)


class LazyLoader:
    """A sized plain iterable: calls ``make`` with 0, 1, ... when each batch is due."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._length))


def _in_groups(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(records, lambda record: record["group_id"])]


def trainable(rollouts: list[Rollout]) -> list[Rollout]:
    """Those that were completed and graded.

    Raises:
        RewardError: if there are none.
    """
    kept = [r for r in rollouts if r.graded]
    if not kept:
        first = next((r.error for r in rollouts if r.error), "all were aborted")
        raise RewardError(
            f"none of {len(rollouts)} rollouts can be trained on; first error: {first}", rollouts
        )
    return kept


class RolloutBatches:
    """Takes groups from a collector, grades them, and replaces those that filters reject.

    Of the last batch it tells: ``kept`` groups, all rollouts that were ``generated``, how many
    groups each filter ``rejected``, and the ``seconds`` that they took to come about; what works
    while the trainer trains has had the time since the batch before.

    Args:
        pipeline: generates and grades.
        collector: decides when which group is generated.
        source: issues the groups.
        filters: rejected groups are replaced by groups of new prompts (DAPO's dynamic sampling).
        max_rounds: how often to ask for replacements in one iteration.
        refill_seconds: after which no more are asked for; None: no limit.
        train_on_rest: groups that are still missing then are made up by the last that filters
            rejected, in place of an error; what is still written after ``refill_seconds`` as a
            replacement is evicted.
    """

    def __init__(
        self,
        pipeline: RolloutPipeline,
        collector: Collector,
        source: GroupSource,
        filters: Sequence[GroupFilter] = (),
        max_rounds: int = 1,
        refill_seconds: float | None = None,
        train_on_rest: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.collector = collector
        self.source = source
        self.filters = filters
        self.max_rounds = max_rounds
        self.refill_seconds = math.inf if refill_seconds is None else refill_seconds
        self.train_on_rest = train_on_rest
        self._acked: float | None = None
        self._clear()
        collector.bind(pipeline, source)

    def _clear(self) -> None:
        self.generated: list[Rollout] = []
        self.kept: list[Group] = []
        self.rejected: Counter[str] = Counter()
        self._set_aside: list[tuple[Group, list[Rollout]]] = []
        self._made_up = 0
        self.seconds = 0.0
        self._ahead: dict[str, float] = {}
        self._taken: list[Group] = []

    def collect(self, iteration: int, consumer: Consumer | None = None) -> list[Rollout]:
        """This rank's share of an iteration's groups that all filters keep; held until ``ack``.

        A ``consumer`` works on them as they are complete, if the collector streams.

        Raises:
            EngineError: if the engine is not ready, or fails.
            FilterError: if too few groups were kept in ``max_rounds`` rounds, or
                ``refill_seconds``, and ``train_on_rest`` is not set.
            RewardError: if too large a share could not be graded.
        """
        self._clear()
        engine = self.pipeline.engine
        with dist.every_rank():
            if drives_engine(engine):
                self._fill(iteration, consumer)
        if engine.serves_all_ranks:
            self.kept = dist.scatter(self.kept)
        return self.rollouts

    def _fill(self, iteration: int, consumer: Consumer | None) -> None:
        """Keep ``source.num_groups`` groups."""
        self.pipeline.engine.require_ready()
        end, rounds = time.monotonic() + self.refill_seconds, 0
        while missing := self.source.num_groups - len(self.kept):
            left = end - time.monotonic()
            if rounds and (rounds == self.max_rounds or left <= 0):
                self._make_up(missing, rounds)
                return
            rounds += 1
            bounded = self.train_on_rest and rounds > 1  # what the first writes is the rest
            groups = self._take(iteration, missing, consumer, left if bounded else math.inf)
            self._taken += groups
            for group in groups:
                self.add(group)
            self.pipeline.rewards.require_graded([r for group in groups for r in group])

    def _make_up(self, missing: int, rounds: int) -> None:
        """Train on what there is: take the last rejected groups back, if that is wanted."""
        if not self.train_on_rest:
            raise FilterError(
                f"after {rounds} rounds only {len(self.kept)} of "
                f"groups_per_iteration={self.source.num_groups} groups passed the filters "
                f"({self.tell()}): the prompts are exhausted, too easy or too hard; raise "
                "max_rounds (or refill_seconds), change the prompts, drop the filter, or set "
                "train_on_rest: true"
            )
        for group, completed in self._set_aside[-missing:]:
            for rollout in completed:
                rollout.status = RolloutStatus.COMPLETED
            self.kept.append(group)
        self._made_up = missing

    def _take(
        self, iteration: int, count: int, consumer: Consumer | None, seconds: float
    ) -> list[Group]:
        begin, since = time.perf_counter(), self._acked
        if self.collector.works_between_batches and since is not None:
            begin, self._acked = since, None
        with self.pipeline.clock("generate"):
            if consumer is not None and isinstance(self.collector, StreamedCollector):
                self._stream(self.collector, iteration, count, consumer)
            groups = run_async(self._in_loop(iteration, count, seconds))
        self.seconds += time.perf_counter() - begin
        self.pipeline.grade(groups)
        return groups

    def _stream(
        self, collector: StreamedCollector, iteration: int, count: int, consumer: Consumer
    ) -> None:
        """Let the consumer work on groups that filters keep, until all are complete."""

        async def begin() -> list[Group]:
            self.source.begin(iteration)
            return await collector.begin(count, consumer.first)

        before = len(self.kept)
        elsewhere = self.pipeline.engine.serves_all_ranks  # servers have threads of their own
        with nullcontext() if elsewhere else beside_engine(collector.engine_threads):
            groups = run_async(begin())
            while places := run_async(collector.complete()):
                kept = [p for p in places if all(f.keep(groups[p]) for f in self.filters)]
                consumer.add([(before + place, groups[place]) for place in kept])

    async def _in_loop(self, iteration: int, count: int, seconds: float) -> list[Group]:
        """The collector's next groups; none, if it does not have them in so many seconds."""
        # All that works ahead is in this thread too, so nothing changes in the middle of it.
        self.source.begin(iteration)
        limit = asyncio.timeout(None if seconds == math.inf else seconds)
        try:
            async with limit:
                groups = await self.collector.take(count)
        except TimeoutError:
            if not limit.expired():
                raise
            groups = []
            await self.collector.evict(self._taken)
        dropped, self.collector.dropped = self.collector.dropped, []
        self.generated += [rollout for group in dropped for rollout in group]
        self._ahead = self.collector.metrics()
        if self.pipeline.engine.replica_count > 1:
            states = [replica.state for replica in self.pipeline.engine.replica_states()]
            self._ahead["collect/replicas"] = float(states.count(RunState.RUNNING))
        return groups

    def add(self, group: Group) -> None:
        """Keep a group, or mark its rollouts SKIPPED and note which filter rejected it."""
        self.generated += group
        for group_filter in self.filters:
            if not group_filter.keep(group):
                self.rejected[type(group_filter).__name__] += 1
                completed = [rollout for rollout in group if rollout.completed]
                self._set_aside.append((group, completed))
                for rollout in completed:
                    rollout.status = RolloutStatus.SKIPPED
                return
        self.kept.append(group)

    @property
    def rollouts(self) -> list[Rollout]:
        """The kept ones."""
        return [rollout for group in self.kept for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Groups that each filter rejected, or that made up a batch; what the collector has."""
        made_up = {"filter/made_up": float(self._made_up)} if self.train_on_rest else {}
        rejected = {f"filter/{name}": float(n) for name, n in self.rejected.items()}
        return self._ahead | rejected | made_up

    def of_all_ranks(
        self, version: int, versions: Mapping[str, int] | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Every rank's groups of the last batch in the order of their places, and what they say.

        ``versions``: of several policies, by the roles that they play.

        On several ranks without logprobs, and of prompts only the id: less to send.
        """
        groups = in_groups(self.generated)
        if dist.world_size() > 1:
            light = [[_without_logprobs(rollout) for rollout in group] for group in groups]
            groups = dist.interleaved(dist.gather(light))
        rollouts = [rollout for group in groups for rollout in group]
        metrics = rollout_metrics(rollouts, dist.all_reduce_max(self.seconds), version, versions)
        return groups, metrics | dist.all_reduce_sum(self.metrics())

    def tell(self) -> str:
        """Say in words which filter rejected how many groups."""
        parts = (f"{name} rejected {count}" for name, count in self.rejected.items())
        return ", ".join(parts) or "none was rejected"

    def observe(self, prompts: PromptDataset, groups: Sequence[Group]) -> None:
        """Tell prompts of all ranks' groups: on each rank after the same number of draws.

        Filters make ranks draw more or fewer prompts, and what works ahead draws at any time. A
        curriculum or mixture needs all to learn, and to go on, from one place.
        """

        async def in_loop() -> None:  # where prompts are drawn: none is, while ranks agree
            if not self.pipeline.engine.serves_all_ranks:
                self.source.catch_up(int(dist.all_reduce_max(self.source.drawn)))
            prompts.observe(groups)

        run_async(in_loop())

    def ack(self) -> None:
        """Take note that the batch is in safe hands, and begin to work on the next one."""
        # Nobody waits: the loop may be in the middle of an engine's step.
        runtime.loop.call_soon_threadsafe(self.collector.ack, self._taken)
        self._acked = time.perf_counter()

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """Let an evaluation have the engine first."""
        context = self.collector.yielding()
        run_async(context.__aenter__())
        try:
            yield
        finally:
            run_async(context.__aexit__(None, None, None))

    # Taken in the loop, between two steps of whatever works ahead there.
    def state_dict(self) -> dict[str, Any]:
        """The place of the source, and every group that is not in a batch yet; primitives only."""

        async def snapshot() -> dict[str, Any]:
            return {
                "source": self.source.state_dict(),
                "collector": self.collector.state_dict(),
            }

        return run_async(snapshot())

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on where all ranks stood; what they had in hand is dealt out anew to another number.

        An engine that serves all ranks is fed by the first of them only.
        """
        if dist.rank() > 0 and self.pipeline.engine.serves_all_ranks:
            return
        feeding = states[: states[0]["source"]["ranks"]]
        self.source.load_shares([state["source"] for state in feeding])
        collectors = [state["collector"] for state in feeding]
        rank, ranks = self.source.rank, self.source.ranks
        self.collector.load_state_dict(
            {
                name: dist.reshard([c[name] for c in collectors], rank, ranks)
                for name in collectors[0]
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state of one process was taken."""
        self.load_shares([state])

    def close(self, timeout: float | None = None) -> None:
        """Stop what is in flight; it stays in the state.

        Raises:
            TimeoutError: if something blocks the loop for longer than ``timeout`` seconds.
        """
        run_async(self.collector.close(), timeout)


def _without_logprobs(rollout: Rollout) -> Rollout:
    rows = [replace(row, prompt_ids=[], logprobs=[]) for row in rollout.rows]
    prompt = Prompt(rollout.prompt.id, "", [], set=rollout.prompt.set)
    return replace(rollout, prompt=prompt, rows=rows)
