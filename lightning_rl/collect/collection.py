"""Collection: the batches of a run, one per iteration, from a collector, filters and a buffer."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from lightning_rl.collect.collector import Collector
from lightning_rl.collect.demonstrations import DemonstrationRows
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline, in_groups
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.selection import GroupSelection, SelectedGroups
from lightning_rl.collect.stats import rollout_metrics, set_metrics, waste_metrics
from lightning_rl.collect.streamed import Consumer, StreamedCollector
from lightning_rl.engines.base import RunState, drives_engine
from lightning_rl.rollout import Group, Prompt, Rollout
from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.cores import beside_engine, switching_often


class Collection:
    """Collects the batches of a run: takes graded groups from a collector, and selects among them.

    For each iteration ``collect`` gives the groups that filters keep, ``of_all_ranks`` those of
    every rank as they were graded, and ``batch`` what to train on. ``state_dict`` has everything
    that a later batch needs.

    Attributes describe the last batch: the ``selection`` of its groups, all rollouts ``generated``,
    and the ``seconds`` that they took. A collector that works while the trainer trains has had the
    time since the batch before.

    Args:
        pipeline: generates and grades.
        collector: decides when which group is generated.
        source: issues the groups.
        selection: which groups are trained on, and what replaces the others.
        buffer: keeps the groups, and adds older ones to each batch; None: none.
        demonstrations: are imitated beside the groups; None: none.
        stream: works on complete groups while the others are generated; None: nothing does.
        meanwhile: called again and again while a batch is awaited; may push weights.
    """

    def __init__(
        self,
        pipeline: RolloutPipeline,
        collector: Collector,
        source: GroupSource,
        selection: GroupSelection = GroupSelection(),
        buffer: ReplayBuffer | None = None,
        demonstrations: DemonstrationRows | None = None,
        stream: Consumer | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.collector = collector
        self.source = source
        self.selection = SelectedGroups(source, selection)
        self.buffer = buffer
        self.demonstrations = demonstrations
        self._stream = stream
        self._meanwhile = meanwhile
        self._acked: float | None = None
        self._cancelled: int | None = None  # tokens of cancelled requests, when last counted
        self._until_closed = ExitStack()
        self.clear()
        collector.bind(pipeline, source, self.selection if self.selection.filters else None)

    def clear(self) -> None:
        """Forget the last batch."""
        self.selection.clear()
        self.generated: list[Rollout] = []
        self.seconds = 0.0
        self._ahead: dict[str, float] = {}

    def collect(self, iteration: int) -> list[Rollout]:
        """Return this rank's share of the groups that all filters keep; held until ``ack``.

        Iterations are counted from 0 on.

        Raises:
            EngineError: if the engine is not ready, or fails.
            FilterError: if filters kept too few groups, and ``fill_with_rejected`` is not set.
            RewardError: if too large a share could not be graded.
        """
        if self._stream is not None:
            self._stream.begin(self.source.num_groups)
        self.clear()
        engine = self.pipeline.engine
        if self._cancelled is None:
            self._cancelled = engine.cancelled_tokens
            if self.collector.works_between_batches:
                self._until_closed.enter_context(switching_often())
        with dist.every_rank():
            if drives_engine(engine):
                self._fill(iteration)
        if engine.serves_all_ranks:
            self.selection.kept = dist.scatter(self.selection.kept)
        return self.rollouts

    def batch(self, iteration: int, version: int) -> list[Rollout]:
        """Return this rank's rollouts to train on: those collected, older ones and demonstrations.

        ``version`` is that of the trainer's weights. The collector can start the next batch.
        """
        groups = list(map(self._finished, self.selection.kept))
        if self.buffer is not None:
            groups = self.buffer.exchange(groups, version)
        rollouts = [rollout for group in groups for rollout in group]
        if self.demonstrations is not None:
            rollouts += self.demonstrations.rollouts(iteration, self.pipeline.tokenizer)
        self.ack()
        if self._stream is not None:
            self._stream.finish([rollout for rollout in rollouts if rollout.graded])
        return rollouts

    def _fill(self, iteration: int) -> None:
        self.pipeline.engine.require_ready()
        for missing, seconds in self.selection.rounds(time.monotonic):
            self.add(self._take(iteration, missing, seconds))

    def add(self, groups: Sequence[Group]) -> None:
        """Add groups that the collector gave, which are graded."""
        rollouts = [rollout for group in groups for rollout in group]
        self.generated += rollouts
        self.selection.add(groups)
        self.pipeline.rewards.require_graded(rollouts)

    def _take(self, iteration: int, count: int, seconds: float) -> list[Group]:
        begin, since = time.perf_counter(), self._acked
        if self.collector.works_between_batches and since is not None:
            begin, self._acked = since, None
        with self.pipeline.clock("generate"):
            if self._stream is not None:
                seconds = self._work_ahead(self._stream, iteration, count, seconds)
            groups = run_async(self.in_loop(iteration, count, seconds), meanwhile=self._meanwhile)
        self.seconds += time.perf_counter() - begin
        self.pipeline.grade(groups)
        return groups

    def _work_ahead(self, stream: Consumer, iteration: int, count: int, seconds: float) -> float:
        """Let the stream work on groups that filters keep, until all are complete.

        Returns:
            How many of the seconds are left; 0 if they were over before all were complete.
        """
        collector = self.collector
        assert isinstance(collector, StreamedCollector)

        async def begin() -> list[Group]:
            self.source.begin(iteration)
            return await collector.begin(count, stream.first)

        async def complete() -> list[int]:
            with suppress(TimeoutError):
                async with asyncio.timeout(_limit(end - time.monotonic())):
                    return await collector.complete()
            return []

        before, end = len(self.selection.kept), time.monotonic() + seconds
        elsewhere = self.pipeline.engine.serves_all_ranks  # servers have threads of their own
        with nullcontext() if elsewhere else beside_engine(collector.engine_threads):
            groups = run_async(begin())
            while indices := run_async(complete()):
                kept = [index for index in indices if self.selection.verdict(groups[index]) is None]
                stream.add([(before + index, self._finished(groups[index])) for index in kept])
        return max(0.0, end - time.monotonic())

    def _finished(self, group: Group) -> Group:
        """Return a graded group as its plan wants it in the batch."""
        return self.source.by_prompt(group[0].prompt).plan.finish(group)

    async def in_loop(self, iteration: int, count: int, seconds: float) -> list[Group]:
        """The collector's next groups; after so many seconds, those that are finished."""
        # All that prefetches is in this thread too, so nothing changes in the middle of it.
        self.source.begin(iteration)
        limit = asyncio.timeout(_limit(seconds))
        try:
            async with limit:
                groups = await self.collector.take(count)
        except TimeoutError:
            if not limit.expired():
                raise
            groups = await self.collector.evict(self.selection.taken)
        dropped, self.collector.dropped = self.collector.dropped, []
        self.generated += [rollout for group in dropped for rollout in group]
        self._ahead = self.collector.metrics()
        if self.pipeline.engine.replica_count > 1:
            states = [replica.state for replica in self.pipeline.engine.replica_states()]
            self._ahead["collect/replicas"] = float(states.count(RunState.RUNNING))
        return groups

    @property
    def rollouts(self) -> list[Rollout]:
        """The kept ones."""
        return [rollout for group in self.selection.kept for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Groups that each filter rejected, or that made up a batch; what the collector has."""
        return self._ahead | self.selection.metrics()

    def of_all_ranks(
        self, version: int, versions: Mapping[str, int] | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Return every rank's groups of the last batch in the order of their places, and metrics.

        On several ranks they come without logprobs, and of prompts only the id: less to send. The
        prompts learn from them, after the same number of draws on all ranks.

        Args:
            version: the version of the trainer's weights.
            versions: those of several policies, by the roles that they play.
        """
        groups = in_groups(self.generated)
        if dist.world_size() > 1:
            light = [[_without_logprobs(rollout) for rollout in group] for group in groups]
            groups = dist.interleaved(dist.gather(light))
        of_groups = [[rollout for rollout in group if rollout.trained] for group in groups]
        counted = [rollout for group in of_groups for rollout in group]
        metrics = rollout_metrics(counted, dist.all_reduce_max(self.seconds), version, versions)
        summed = dist.all_reduce_sum(self.metrics() | {"cancelled": self._count_cancelled()})
        metrics |= waste_metrics(counted, int(summed.pop("cancelled")))
        return groups, metrics | summed | self._observe(of_groups)

    def _count_cancelled(self) -> float:
        """Return how many tokens cancelled requests have left behind since the last batch."""
        before, self._cancelled = self._cancelled or 0, self.pipeline.engine.cancelled_tokens
        return float(self._cancelled - before)

    def _observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Show the prompts all ranks' groups, after the same number of draws; return their metrics.

        Filters make ranks draw more or fewer prompts, and what prefetches draws at any time. A
        curriculum or mixture needs all to learn, and to go on, from one place.
        """

        async def in_loop() -> None:  # where prompts are drawn: none is, while ranks agree
            if not self.pipeline.engine.serves_all_ranks:
                self.source.catch_up(int(dist.all_reduce_max(self.source.drawn)))
            prompts.observe(groups)

        prompts = self.source.prompts
        run_async(in_loop())
        dropped = {"data/prompts_dropped": float(prompts.dropped)} if prompts.dropped else {}
        return set_metrics(groups, prompts.shares()) | dropped

    def ack(self) -> None:
        """Acknowledge the batch, so that the collector can start the next one."""
        # Nobody waits: the loop may be in the middle of an engine's step.
        runtime.loop.call_soon_threadsafe(self.collector.ack, self.selection.taken)
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

    # Taken in the loop, between two steps of whatever prefetches there.
    def state_dict(self) -> dict[str, Any]:
        """The place of the source, and every group that is not in a batch yet; primitives only."""

        async def snapshot() -> dict[str, Any]:
            return {
                "source": self.source.state_dict(),
                "collector": self.collector.state_dict(),
            }

        return run_async(snapshot())

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume from all ranks' states; unfinished groups are shared out anew among new ranks.

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

    def state_of_others(self) -> dict[str, Any]:
        """Return the state of the buffer and of the demonstrations, which no rank has to itself."""
        parts = self._others().items()
        return {name: None if part is None else part.state_dict() for name, part in parts}

    def load_state_of_others(self, state: Mapping[str, Any]) -> None:
        """Resume the buffer and the demonstrations where they stood."""
        for name, part in self._others().items():
            if part is not None and state.get(name) is not None:
                part.load_state_dict(state[name])

    def _others(self) -> dict[str, Any]:
        rows = self.demonstrations
        return {"buffer": self.buffer, "demonstrations": None if rows is None else rows.prompts}

    def close(self, timeout: float | None = None) -> None:
        """Stop what is in flight; it stays in the state.

        Raises:
            TimeoutError: if something blocks the loop for longer than ``timeout`` seconds.
        """
        self._until_closed.close()
        run_async(self.collector.close(), timeout)


def _limit(seconds: float) -> float | None:
    return None if seconds == math.inf else max(0.0, seconds)


def _without_logprobs(rollout: Rollout) -> Rollout:
    rows = [replace(row, prompt_ids=[], logprobs=[]) for row in rollout.rows]
    prompt = Prompt(rollout.prompt.id, "", [], set=rollout.prompt.set)
    return replace(rollout, prompt=prompt, rows=rows)
