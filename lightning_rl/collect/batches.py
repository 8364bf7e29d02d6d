"""RolloutBatches: batch after batch of graded groups that the filters keep, on all ranks."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_rl.collect.collector import Collector
from lightning_rl.collect.filters import GroupFilter
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.source import GroupSource
from lightning_rl.engines.base import RunState, feeds_engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import FilterError
from lightning_rl.rollout import Group, Prompt, Rollout, RolloutStatus
from lightning_rl.run import dist
from lightning_rl.run.loop import background_loop, run_async


@dataclass
class Collection:
    """One iteration's groups: all that were generated, and those that the filters kept.

    ``seconds`` is how long they took to come about; what works while the trainer trains has had the
    time since the last batch. ``ahead`` are the collector's own metrics.
    """

    generated: list[Rollout] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    ahead: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """The kept ones."""
        return [rollout for group in self.kept for rollout in group]

    def add(self, group: Group, filters: Sequence[GroupFilter]) -> None:
        """Keep a group, or mark its rollouts SKIPPED and note which filter rejected it."""
        self.generated += group
        for group_filter in filters:
            if not group_filter.keep(group):
                self.rejected[type(group_filter).__name__] += 1
                for rollout in group:
                    if rollout.completed:
                        rollout.status = RolloutStatus.SKIPPED
                return
        self.kept.append(group)

    def metrics(self) -> dict[str, float]:
        """Groups that each filter rejected, and what the collector has in hand."""
        return self.ahead | {f"filter/{name}": float(n) for name, n in self.rejected.items()}

    def tell(self) -> str:
        """The same in words."""
        parts = (f"{name} rejected {count}" for name, count in self.rejected.items())
        return ", ".join(parts) or "none was rejected"


class RolloutBatches:
    """Takes groups from a collector, grades them, and replaces those that filters reject.

    Args:
        pipeline: generates and grades.
        collector: decides when which group is generated.
        source: issues the groups.
        filters: rejected groups are replaced by groups of new prompts (DAPO's dynamic sampling).
        max_rounds: how often to ask for replacements in one iteration.
    """

    def __init__(
        self,
        pipeline: RolloutPipeline,
        collector: Collector,
        source: GroupSource,
        filters: Sequence[GroupFilter] = (),
        max_rounds: int = 1,
    ) -> None:
        self.pipeline = pipeline
        self.collector = collector
        self.source = source
        self.filters = filters
        self.max_rounds = max_rounds
        self._taken: list[Group] = []
        self._acked: float | None = None

    def collect(self, iteration: int) -> Collection:
        """``source.num_groups`` groups that all filters keep; in the state until ``ack``.

        Raises:
            EngineError: if the engine is not ready, or fails.
            FilterError: if too few groups were kept in ``max_rounds`` rounds.
            RewardError: if too large a share could not be graded.
        """
        self.pipeline.engine.require_ready()
        collection, self._taken = Collection(), []
        for _ in range(self.max_rounds):
            missing = self.source.num_groups - len(collection.kept)
            if missing == 0:
                break
            groups = self._take(iteration, missing, collection)
            self._taken += groups
            for group in groups:
                collection.add(group, self.filters)
            self.pipeline.rewards.require_graded([r for group in groups for r in group])
        self._require_enough(collection)
        return collection

    def catch_up(self, drawn: int) -> None:
        """Let the source draw as far as another rank's has."""

        async def in_loop() -> None:
            self.source.catch_up(drawn)

        run_async(in_loop())

    def ack(self) -> None:
        """What ``collect`` returned is in safe hands; begin to work on the next batch."""
        # Nobody waits: the loop may be in the middle of an engine's step.
        background_loop().call_soon_threadsafe(self.collector.ack, self._taken)
        self._acked = time.perf_counter()

    def _take(self, iteration: int, count: int, collection: Collection) -> list[Group]:
        begin, since = time.perf_counter(), self._acked
        if self.collector.works_between_batches and since is not None:
            begin, self._acked = since, None
        with self.pipeline.clock("generate"):
            groups = run_async(self._in_loop(iteration, count, collection))
        collection.seconds += time.perf_counter() - begin
        self.pipeline.grade(groups)
        return groups

    async def _in_loop(self, iteration: int, count: int, collection: Collection) -> list[Group]:
        # All that works ahead is in this thread too, so nothing changes in the middle of it.
        self.source.begin(iteration)
        groups = await self.collector.take(self.pipeline, self.source, count)
        dropped, self.collector.dropped = self.collector.dropped, []
        collection.generated += [rollout for group in dropped for rollout in group]
        collection.ahead = self.collector.metrics()
        if self.pipeline.engine.replica_count > 1:
            states = [replica.state for replica in self.pipeline.engine.replica_states()]
            collection.ahead["collect/replicas"] = float(states.count(RunState.RUNNING))
        return groups

    def _require_enough(self, collection: Collection) -> None:
        if len(collection.kept) < self.source.num_groups:
            raise FilterError(
                f"after {self.max_rounds} rounds only {len(collection.kept)} of "
                f"groups_per_iteration={self.source.num_groups} groups passed the filters "
                f"({collection.tell()}): the prompts are exhausted, too easy or too hard; raise "
                "max_rounds, change the prompts, or drop the filter"
            )

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
        """Where the source stands, and every group that is not in a batch yet; primitives only."""

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


def collect_share(batches: RolloutBatches, iteration: int) -> Collection:
    """This rank's share of an iteration's groups; what fails on one rank fails on all."""
    engine = batches.pipeline.engine
    with dist.every_rank():
        collection = batches.collect(iteration) if feeds_engine(engine) else Collection()
    if engine.serves_all_ranks:
        collection.kept = dist.scatter(collection.kept)
        return collection
    # Filters make ranks draw more or fewer prompts. A curriculum needs all to go on from one place.
    batches.catch_up(int(dist.all_reduce_max(batches.source.drawn)))
    return collection


def complete_together(
    pipeline: RolloutPipeline, groups: Sequence[Group], sampling: Sampling
) -> list[Group]:
    """Generate and grade groups that all ranks have, sharing the work; all get all of them."""
    engine = pipeline.engine
    if engine.serves_all_ranks:
        share = list(groups) if feeds_engine(engine) else []
    else:
        share = dist.shard(groups)
    with dist.every_rank():
        if feeds_engine(engine):
            pipeline.complete(share, sampling)
    return dist.interleaved(dist.gather(share))


def of_all_ranks(groups: list[Group]) -> list[Group]:
    """Every rank's groups in the order of their places, as statistics need them.

    On several ranks without logprobs, and of prompts only the id: less to send.
    """
    if dist.world_size() == 1:
        return groups
    light = [
        [replace(r, prompt=Prompt(r.prompt.id, "", []), logprobs=[]) for r in group]
        for group in groups
    ]
    return dist.interleaved(dist.gather(light))
