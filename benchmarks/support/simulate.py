"""Simulate collectors: the real classes, on a virtual clock, with an engine made of numbers.

``simulate`` runs hours of training in seconds, always with the same result, and stops with an error
where real time would hang.
"""

import asyncio
import math
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import Collector, GroupFilter
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline, in_groups
from lightning_rl.collect.selection import GroupSelection
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import EngineError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Group, Prompt, Rollout, RolloutStatus
from lightning_rl.run.loop.background import innermost
from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule, SyncState


@dataclass(slots=True, eq=False)
class _Request:
    length: int
    future: asyncio.Future[None]
    begun: float = 0.0  # tokens that a request had got that has run since the start
    versions: list[int] = field(default_factory=list)
    over: bool = False


class SimulatedEngine(Engine):
    """Continuous batching: ``n`` running requests get a token each in ``step + n * per_request`` s.

    Args:
        length: tokens of the completion, by the prompt's number and the request's seed.
        step: seconds that a decoding step takes, however many run.
        per_request: seconds that each running request adds to a step.
        max_num_seqs: requests that run together; others wait.
    """

    dtype = "float32"
    running = True
    max_length = 2**62
    version = 0

    def __init__(
        self,
        length: Callable[[int, int], int],
        step: float = 0.02,
        per_request: float = 0.0,
        max_num_seqs: int = 256,
    ) -> None:
        self.length = length
        self.step = step
        self.per_request = per_request
        self.max_num_seqs = max_num_seqs
        self.tokens = 0.0
        self.slot_seconds = 0.0
        self._waiting: deque[_Request] = deque()
        # All that run get their tokens together: who is done next is known when it begins.
        self._running: list[tuple[float, int, _Request]] = []  # a heap; some may be over
        self._count = 0  # of those that are not
        self._order = count()
        self._written = 0.0  # tokens that a request has got that has run since the start
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def token_seconds(self, running: int) -> float:
        """Return the seconds of a step in which so many requests get a token."""
        return self.step + self.per_request * running

    def start(self, model_dir: Path) -> None:
        """Start nothing: there is nothing to build."""

    def close(self) -> None:
        """Close nothing: there is nothing to free."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._advance()
        for _, _, request in self._running:
            self._stamp(request)
        self.version = version

    async def pause(self) -> None:
        self._advance()
        self._paused = True
        self._plan()

    async def resume(self) -> None:
        self._advance()
        self._paused = False
        self._plan()

    async def generate(self, token_ids: Any, sampling: Sampling, seed: int) -> Completion:
        length = min(max(1, self.length(token_ids[0], seed)), sampling.max_tokens)
        request = _Request(length, asyncio.get_running_loop().create_future())
        self._advance()
        self._waiting.append(request)
        self._plan()
        try:
            await request.future
        finally:
            if not request.over:  # it was cancelled
                self._advance()
                self._leave(request)
                self._plan()
        return Completion([0] * length, [0.0] * length, "stop", request.versions)

    def _advance(self) -> None:
        """Credit what was written since the last change."""
        now = asyncio.get_running_loop().time()
        elapsed, self._since = now - self._since, now
        if self._paused or not self._count:
            return
        written = elapsed / self.token_seconds(self._count)
        self._written += written
        self.tokens += self._count * written
        self.slot_seconds += self._count * elapsed
        while self._running and self._running[0][0] < self._written + 1e-6:
            _, _, request = heappop(self._running)
            if request.over:
                continue
            self._stamp(request, done=True)
            request.over = True
            self._count -= 1
            if not request.future.done():
                request.future.set_result(None)

    def _leave(self, request: _Request) -> None:
        request.over = True
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._count -= 1
            self._stamp(request)
            self._cancelled_tokens += len(request.versions)

    def _plan(self) -> None:
        """Let those that wait begin, and wake up when the next request is done."""
        while self._waiting and self._count < self.max_num_seqs:
            request = self._waiting.popleft()
            request.begun = self._written
            end = self._written + request.length
            heappush(self._running, (end, next(self._order), request))
            self._count += 1
        while self._running and self._running[0][2].over:
            heappop(self._running)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            left = self._running[0][0] - self._written
            self._timer = asyncio.get_running_loop().call_later(
                left * self.token_seconds(self._count), self._wake
            )

    def _wake(self) -> None:
        self._advance()
        self._plan()

    def _stamp(self, request: _Request, done: bool = False) -> None:
        written = math.floor(self._written - request.begun + 1e-6)
        written = request.length if done else written
        request.versions += [self.version] * (written - len(request.versions))


def _tokens(group: Group) -> int:
    return sum(rollout.length for rollout in group)


T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise EngineError("the simulation hangs: everybody waits, and nothing is under way")
        self.now += max(timeout, 0.0)
        return super().select(0)


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop whose clock jumps from timer to timer.

    Raises:
        EngineError: when everybody waits, and no timer is set.
    """
    clock = _Jump()

    def virtual_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now  # type: ignore[method-assign]
        return loop

    try:
        with asyncio.Runner(loop_factory=virtual_loop) as runner:
            return runner.run(coroutine)
    except BaseExceptionGroup as group:
        raise innermost(group) from group


class CountedPrompts:
    """Prompts 0, 1, 2, ... whose only token is their number."""

    def __init__(self) -> None:
        self.drawn = 0

    dropped = 0

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Learn nothing from groups."""

    def shares(self) -> dict[str, float]:
        """Return no shares: there are no sets."""
        return {}

    def draw(self, count: int) -> list[Prompt]:
        """Draw the next prompts."""
        self.drawn += count
        return [Prompt(str(n), "", [n]) for n in range(self.drawn - count, self.drawn)]

    def state_dict(self) -> dict[str, Any]:
        """Return the number drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.drawn = state["drawn"]


class _Silent(Agent):
    """Lets another agent write, and spares the pipeline decoding."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        rollout = await self.agent.run(rollout, engine, sampling)
        rollout.completion = "-"
        return rollout


@dataclass
class Simulation:
    """The outcome, in simulated seconds; ``tokens`` are those trained on, ``staleness`` theirs.

    ``waited`` is the trainer's time without a batch, ``trained_seconds`` its time with one,
    ``slot_seconds`` the time in which requests ran, summed over them, ``pushes`` the versions that
    were pushed, ``rejected`` the tokens of groups that filters rejected, ``made_up`` those of them
    that completed a batch, and ``cancelled`` those of aborted requests.
    """

    seconds: float = 0.0
    tokens: int = 0
    waited: float = 0.0
    trained_seconds: float = 0.0
    slot_seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    batches: list[list[Group]] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    pushes: list[int] = field(default_factory=list)
    rejected: int = 0
    made_up: int = 0
    cancelled: int = 0


async def _train_streamed(
    collector: Collector, num_groups: int, train_seconds: Callable[[int], float]
) -> int:
    """Train on groups of a stream as they are complete; returns how many tokens they have."""
    tokens = 0
    if isinstance(collector, StreamedCollector):
        groups = await collector.begin(num_groups)
        while places := await collector.complete():
            count = sum(len(r.token_ids) for place in places for r in groups[place])
            await asyncio.sleep(train_seconds(count))
            tokens += count
    return tokens


def simulate(
    collector: Collector,
    engine: SimulatedEngine,
    iterations: int,
    num_groups: int = 8,
    group_size: int = 4,
    train_seconds: Callable[[int], float] = lambda tokens: 0.0,
    sync_seconds: float = 0.0,
    agent: Agent = SingleTurn(),
    prompts: CountedPrompts | None = None,
    max_tokens: int = 2**30,
    first: int = 0,
    ahead: bool = False,
    schedule: SyncSchedule = FixedSchedule(),
    filters: Sequence[GroupFilter] = (),
    refill_seconds: float | None = None,
) -> Simulation:
    """Train on what a collector hands over, in iterations ``first`` to ``iterations - 1``.

    Args:
        train_seconds: that training on so many tokens takes; a part of them, its share.
        sync_seconds: that a weight sync takes, while the engine is paused.
        first: where a run goes on that stopped after so many iterations.
        ahead: let the collector prefetch beyond the end, as for a longer run.
        schedule: after which iterations weights are synced.
        filters: groups that any of them rejects are replaced.
        refill_seconds: after which rejected groups complete the batch; None: never.

    Raises:
        EngineError: if the collector hangs.
    """

    async def reward(completions: list[str]) -> list[float]:  # in the loop, whose clock is virtual
        return [0.0] * len(completions)

    async def run() -> Simulation:
        result = Simulation()
        clock = asyncio.get_running_loop().time
        rewards = Rewards([reward])  # type: ignore[list-item]
        tokenizer: Any = None
        pipeline = RolloutPipeline(engine, _Silent(agent), rewards, tokenizer)
        sampling = Sampling(max_tokens=max_tokens)
        source = GroupSource(
            prompts or CountedPrompts(),
            num_groups,
            group_size,
            sampling,
            iterations=lambda: None if ahead else iterations,
        )
        selection = GroupSelection(list(filters), 1000, refill_seconds, refill_seconds is not None)
        collection = Collection(pipeline, collector, source, selection)
        try:
            for iteration in range(first, iterations):
                source.begin(iteration)
                begin = clock()
                streamed = await _train_streamed(collector, num_groups, train_seconds)
                collection.clear()
                for missing, seconds in collection.selection.rounds(clock):
                    taken = await collection.in_loop(iteration, missing, seconds)
                    await rewards.grade_ahead(taken)
                    collection.add(taken)
                groups = collection.selection.kept
                result.waited += clock() - begin - train_seconds(streamed)
                result.batches.append(groups)
                for group in in_groups(collection.generated):
                    if group[0].status in (RolloutStatus.ABORTED, RolloutStatus.EXPIRED):
                        result.dropped.append(group)
                    elif group[0].status is RolloutStatus.SKIPPED:
                        result.rejected += _tokens(group)
                for group in groups[num_groups - collection.selection.made_up :]:
                    result.made_up += _tokens(group)
                collector.ack(collection.selection.taken)
                versions = [v for g in groups for r in g for v in r.versions]
                result.staleness.update(iteration - v for v in versions)
                result.tokens += len(versions)
                result.trained_seconds += train_seconds(len(versions))
                await asyncio.sleep(train_seconds(len(versions) - streamed))
                status = await collector.status()
                if not schedule.should_sync(SyncState(iteration + 1, engine.version, status)):
                    continue
                result.pushes.append(iteration + 1)
                await collector.before_sync()
                await engine.pause()
                await asyncio.sleep(sync_seconds)
                engine.load_weights([], iteration + 1)
                await engine.resume()
                await collector.after_sync()
            result.seconds, result.slot_seconds = clock(), engine.slot_seconds
            result.cancelled = engine.cancelled_tokens
        finally:
            await collector.close()
        result.given_back = [record["id"] for record in source.state_dict()["again"]]
        return result

    return run_virtual(run())
