"""Collectors on a virtual clock: nothing lost, nothing doubled, nothing too old, nothing hangs."""

import asyncio
import gc
import json
import math
import threading
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import example, given, settings, strategies as st

from benchmarks.support.simulate import CountedPrompts, SimulatedEngine, run_virtual, simulate
from lightning_rl.agents.base import SingleTurn
from lightning_rl.collect.collector import Collector, GroupFilter, SyncCollector
from lightning_rl.collect.partial import (
    PartialCollector,
    PartialTailCollector,
    TailBatchingCollector,
)
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.loop.background import require_awaited, run_async, runtime
from lightning_rl.sync.schedule import CollectorSchedule


def lengths(*pattern):
    """Return completion lengths by seed: a pattern picked from pseudo-randomly, but fixed."""
    return lambda prompt, seed: pattern[seed % len(pattern)]


def heavy(prompt: int, seed: int) -> int:
    """Return Pareto-like lengths: most are short, some are a hundred times longer."""
    u = (seed % 10_007 + 1) / 10_008
    return min(400, math.ceil(4 * u**-0.8))


collectors = st.one_of(
    st.builds(SyncCollector, st.sampled_from([None, 1, 3])),
    st.builds(StreamedCollector, st.sampled_from([None, 1, 3])),
    st.builds(AsyncCollector, st.integers(0, 4), st.sampled_from([None, 1, 5]), st.booleans()),
    st.builds(OneStepOffCollector),
    st.builds(PartialCollector, st.sampled_from([1.1, 1.5, 3.0]), st.integers(1, 4)),
    st.builds(
        TailBatchingCollector,
        st.sampled_from([1.1, 1.5, 3.0]),
        st.sampled_from([None, 1, 7]),
        st.integers(1, 3),
    ),
    st.builds(
        PartialTailCollector,
        st.sampled_from([1.1, 1.5, 3.0]),
        st.integers(2, 4),
        st.sampled_from([None, 1, 7]),
        st.integers(1, 2),
    ),
)


def put_off(state: dict) -> list[str]:
    """Return ids of prompts that a collector's state will issue again."""
    prompts = [*state.get("tail", []), *(prompt for prompt, _ in state.get("again", []))]
    return [prompt["id"] for prompt in prompts]


@settings(max_examples=80, deadline=None)
@given(
    collector=collectors,
    pattern=st.lists(st.integers(1, 300), min_size=1, max_size=7),
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 3),
    iterations=st.integers(1, 7),
    slots=st.sampled_from([2, 8, 64]),
    train=st.sampled_from([0.0, 1.0, 30.0]),
    sync=st.sampled_from([0.0, 0.5]),
)
def test_no_prompt_is_lost_or_doubled_and_no_token_is_too_old(
    collector, pattern, num_groups, group_size, iterations, slots, train, sync
):
    engine = SimulatedEngine(lengths(*pattern), max_num_seqs=slots)
    prompts = CountedPrompts()
    result = simulate(
        collector, engine, iterations, num_groups, group_size, lambda tokens: train, sync,
        prompts=prompts,
    )  # fmt: skip
    assert [len(groups) for groups in result.batches] == [num_groups] * iterations
    bound = {SyncCollector: 0, StreamedCollector: 0, TailBatchingCollector: 0}.get(type(collector))
    bound = collector.max_staleness if bound is None else bound
    assert max(result.staleness) <= bound
    trained = [group for groups in result.batches for group in groups]
    assert all(len(group) == group_size for group in trained)
    assert all(r.status is RolloutStatus.COMPLETED for group in trained for r in group)
    assert all(len(r.versions) == len(r.token_ids) for group in trained for r in group)
    # Each prompt drawn is trained on once, or will be: it is in the collector's state.
    state = json.loads(json.dumps(collector.state_dict()))
    waiting = [group[0]["prompt"]["id"] for group in state["groups"]]
    waiting += put_off(state) + result.given_back
    seen = Counter([group[0].prompt.id for group in trained] + waiting)
    assert seen == Counter(str(n) for n in range(prompts.drawn))
    ids = [r.id for group in trained + result.dropped for r in group]
    assert len(set(ids)) == len(ids)


@settings(max_examples=50, deadline=None)
@given(
    make=st.sampled_from(
        [
            SyncCollector,
            lambda: StreamedCollector(1),
            lambda: AsyncCollector(1),
            lambda: AsyncCollector(3),
            lambda: AsyncCollector(2, abort_stale=True),
            OneStepOffCollector,
            PartialCollector,
            PartialTailCollector,
            TailBatchingCollector,
            lambda: TailBatchingCollector(trigger_size=1, candidate_step=2),
        ]
    ),
    pattern=st.lists(st.integers(1, 300), min_size=1, max_size=7),
    first=st.integers(1, 4),
    then=st.integers(1, 4),
    lower_bound=st.booleans(),
)
def test_a_run_that_stopped_and_goes_on_trains_on_every_prompt_once(
    make, pattern, first, then, lower_bound
):
    collector, prompts = make(), CountedPrompts()
    result = simulate(
        collector, SimulatedEngine(lengths(*pattern)), first, 3, 2, lambda _: 1.0, prompts=prompts,
        ahead=True,
    )  # fmt: skip
    state = json.loads(json.dumps(collector.state_dict()))
    again = make()
    again.load_state_dict(state)
    if lower_bound and hasattr(again, "max_staleness"):
        again.max_staleness = max(1, again.max_staleness - 2)
    engine = SimulatedEngine(lengths(*pattern))
    engine.version = first
    rest = simulate(
        again, engine, first + then, 3, 2, lambda _: 1.0, prompts=prompts, first=first
    )  # fmt: skip
    trained = [g[0].prompt.id for r in (result, rest) for groups in r.batches for g in groups]
    assert len(trained) == len(set(trained)) == 3 * (first + then)
    assert max(rest.staleness) <= getattr(again, "max_staleness", 0)
    state = again.state_dict()
    waiting = [group[0]["prompt"]["id"] for group in state["groups"]]
    waiting += put_off(state) + rest.given_back
    assert Counter(trained + waiting) == Counter(str(n) for n in range(prompts.drawn))


def test_one_batch_ahead_hides_training_behind_generation():
    # 10 tokens at 1 s each, then 10 s of training. Sync: 4 x 20 s. One ahead: the first batch takes
    # 10 s, then each 10 s of training hides the next batch: 10 + 4 x 10.
    def engine():
        return SimulatedEngine(lengths(10), step=1.0)

    sync = simulate(SyncCollector(), engine(), 4, train_seconds=lambda _: 10.0)
    ahead = simulate(AsyncCollector(1), engine(), 4, train_seconds=lambda _: 10.0)
    assert (sync.seconds, ahead.seconds) == (pytest.approx(80), pytest.approx(50))
    assert sync.staleness == {0: 4 * 320}
    # The first batch is fresh, the others were written while the version before was trained.
    assert ahead.staleness == {0: 320, 1: 3 * 320}


def test_a_group_that_became_too_stale_is_aborted_once_and_then_waited_for():
    # Batches of one, one version of staleness; prompt 1 takes 100 s, the others 10. It misses its
    # deadline, iteration 1, when 2 is done at 20 s, with 20 tokens. Begun again, it is waited for.
    def run(collector):
        engine = SimulatedEngine(lambda prompt, seed: 100 if prompt == 1 else 10, step=1.0)
        return simulate(collector, engine, 4, 1, 1, ahead=True)

    waits, aborts = run(AsyncCollector(1)), run(collector := AsyncCollector(1, abort_stale=True))
    assert trained_prompts(waits) == [["0"], ["1"], ["2"], ["3"]]
    assert (waits.cancelled, waits.dropped) == (0, [])
    assert trained_prompts(aborts) == [["0"], ["2"], ["1"], ["3"]]
    assert aborts.cancelled == 20
    [[dropped]] = aborts.dropped
    assert (dropped.prompt.id, dropped.status) == ("1", RolloutStatus.EXPIRED)
    assert aborts.seconds == 120
    assert max(aborts.staleness) == 1
    assert collector.state_dict()["restarted"] == []
    # A checkpoint knows which prompts were given up.
    collector.load_state_dict({"groups": [], "restarted": ["7"]})
    assert collector.state_dict() == {"groups": [], "restarted": ["7"]}


class Held(SimulatedEngine):
    """Writes at once, but for the first completion of prompt 1, which waits for ``go``."""

    def __init__(self, fails=False) -> None:
        super().__init__(lengths(1))
        self.go, self.fails, self.asked = asyncio.get_running_loop().create_future(), fails, 0

    async def generate(self, token_ids, sampling, seed):
        self.asked += token_ids[0] == 1
        if token_ids[0] == 1 and self.asked == 1:
            await self.go
            if self.fails:
                raise EngineError("out of memory")
        return Completion([7], [0.0], "stop", [self.version])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("turns", range(9))
def test_an_aborted_group_stays_so_whatever_it_does_in_the_same_turn(turns, fails):
    """The engine has its answer, and the abort comes so many turns of the loop later."""
    unheard = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unheard.append(told))
        engine = Held(fails)
        collector = ready_to_take(AsyncCollector(1, abort_stale=True), engine, 1)
        collector.ack(await collector.take(1))
        (held,) = (g for g in collector._issued.values() if g[0].prompt.id == "1")
        engine.go.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        collector._expire_due(1)
        await asyncio.sleep(1)
        if collector._failure is None:  # else it was heard of before the abort
            assert held[0].group_id not in collector._issued
            assert collector.dropped == [held]
            assert held[0].status is RolloutStatus.EXPIRED
            assert held not in collector._done
            again = [g for g in collector._issued.values() if g[0].prompt.id == "1"]
            again += [prompt for prompt in collector.source._again if prompt.id == "1"]
            assert len(again) == 1
        await collector.close()

    run_virtual(run())
    gc.collect()
    assert unheard == []


class Blocks:
    """A plain reward whose second call waits, and that counts calls that are made at once."""

    def __init__(self) -> None:
        self.now = self.most = self.made = 0
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, completions):
        self.now, self.made = self.now + 1, self.made + 1
        self.most = max(self.most, self.now)
        if self.made == 2:
            self.entered.set()
            self.release.wait(60)
        self.now -= 1
        return [0.0] * len(completions)


def test_a_plain_reward_makes_one_call_at_a_time_though_its_group_is_aborted():
    reward = Blocks()

    async def run():
        engine = Held()
        engine.go.set_result(None)
        collector = ready_to_take(AsyncCollector(1, abort_stale=True), engine, 1, reward)
        collector.ack(await collector.take(1))
        await asyncio.to_thread(reward.entered.wait, 60)
        (group,) = collector._running.values()
        collector._expire_due(1)
        engine.load_weights([], version=1)
        await collector.after_sync()  # its prompt's second group, which asks for the reward again
        assert next(iter(collector._running.values()))[0].prompt.id == group[0].prompt.id
        await asyncio.sleep(0.2)
        assert reward.made == 2
        reward.release.set()
        while reward.made < 3:
            await asyncio.sleep(0.01)
        await collector.close()
        collector.pipeline.rewards.close()

    run_async(run(), 60)
    assert reward.most == 1


class Half(GroupFilter):
    """Rejects every second group, by its seed."""

    def keep(self, group):
        return group[0].seed % 2 == 0


@settings(max_examples=20, deadline=None)
@given(
    max_staleness=st.integers(1, 3),
    num_groups=st.integers(1, 5),
    slots=st.sampled_from([2, 8, 64]),
    train=st.sampled_from([0.0, 1.0, 30.0]),
)
# More finished groups, of prompts that were aborted before, than the batch has places.
@example(max_staleness=2, num_groups=4, slots=64, train=0.0)
def test_what_is_rejected_or_aborted_never_stops_a_run(max_staleness, num_groups, slots, train):
    result = simulate(
        AsyncCollector(max_staleness, abort_stale=True),
        SimulatedEngine(heavy, max_num_seqs=slots), 20, num_groups, 2,
        lambda tokens: train, 0.5, filters=[Half()],
    )  # fmt: skip
    assert [len(groups) for groups in result.batches] == [num_groups] * 20
    assert max(result.staleness) <= max_staleness
    assert all(Half().keep(group) for groups in result.batches for group in groups)


def test_a_stream_hides_the_training_of_groups_that_are_complete():
    # Two groups of four: 10 and 30 tokens at 1 s each, and 0.5 s of training a token. Sync: 30 s,
    # then 20 + 60. Streamed: the short group is trained on from second 10 to 30, then the long one.
    def seconds(collector):
        def length(prompt, seed):
            return 10 if prompt % 2 == 0 else 30

        engine = SimulatedEngine(length, step=1.0)
        result = simulate(collector, engine, 2, 2, 4, train_seconds=lambda tokens: 0.5 * tokens)
        assert result.staleness == {0: 2 * 4 * 40}
        return result.seconds

    assert seconds(SyncCollector()) == pytest.approx(2 * (30 + 80))
    assert seconds(StreamedCollector()) == pytest.approx(2 * (30 + 60))


def test_one_step_off_waits_for_the_batch_before_weights_change():
    # Generation takes 30 s, training 10: each sync waits for the batch, so no rollout has two
    # versions; plain asynchrony lets them go on instead.
    def versions_per_rollout(collector):
        engine = SimulatedEngine(lengths(30), step=1.0)
        result = simulate(collector, engine, 4, train_seconds=lambda _: 10.0)
        return {len(set(r.versions)) for b in result.batches for g in b for r in g}

    assert versions_per_rollout(OneStepOffCollector()) == {1}
    assert versions_per_rollout(AsyncCollector(1)) == {1, 2}


def test_partial_rollouts_keep_what_they_wrote():
    # One slow prompt in four, of 20 tokens against 5. Two groups of two are a batch; the third in
    # flight is cut and goes on with the next version, from where it was.
    order = iter([5, 20, 5, 5] * 10)
    drawn = {}

    def length(prompt, seed):
        return drawn.setdefault(seed, next(order))

    engine = SimulatedEngine(length, step=1.0)
    collector = PartialCollector(over_issue=1.5, max_staleness=4)
    result = simulate(collector, engine, 4, 2, 1)
    # 0 and 2 are done after 5 s; 1 goes on beside 3 and 4, and so on.
    rollouts = [[g[0] for g in batch] for batch in result.batches]
    assert [r.prompt.id for r in rollouts[0]] == ["0", "2"]
    slow = next(r for batch in rollouts for r in batch if r.prompt.id == "1")
    assert slow.versions == [0] * 5 + [1] * 5 + [2] * 10
    assert engine.tokens == pytest.approx(
        result.tokens
    )  # nothing was written twice, or for nothing


def slow_prompts(*slow: int, tokens: int = 100):
    """Return 5 tokens, but for some prompts."""
    return lambda prompt, seed: tokens if prompt in slow else 5


def trained_prompts(result) -> list[list[str]]:
    return [sorted(group[0].prompt.id for group in groups) for groups in result.batches]


def test_a_prompt_counts_as_slow_when_it_was_put_off_often_enough():
    # Batches of two out of three groups; prompt 0 is slow, and the third of three quick ones is put
    # off as well.
    def trained(**options):
        collector = TailBatchingCollector(over_issue=1.5, **options)
        engine = SimulatedEngine(slow_prompts(0), step=1.0)
        return trained_prompts(simulate(collector, engine, 4, 2, 1))

    # One slow prompt makes a long round due; prompt 3 fills it up.
    assert trained(trigger_size=1) == [["1", "2"], ["0", "3"], ["4", "5"], ["6", "7"]]
    # Two do: 0 and 5, put off in the first two rounds.
    assert trained() == [["1", "2"], ["3", "4"], ["0", "5"], ["6", "7"]]
    # The first time, 0 gets another chance beside 3 and 4; the second time it counts as slow.
    assert trained(trigger_size=1, candidate_step=2)[:3] == [["1", "2"], ["3", "4"], ["0", "5"]]
    # Slow after three times, it gets its long round in the fourth.
    assert trained(trigger_size=1, candidate_step=3)[2:] == [["5", "6"], ["0", "7"]]


def test_a_tail_of_partial_rollouts_gets_a_batch_of_its_own():
    # Batches of two, three groups in flight, 100 tokens against 5. Alone, partial rollouts keep on
    # taking the quick ones until the slow group's deadline, in iteration 4, is near. In the tail
    # mode it is waited for in the second batch, beside which no third group is begun.
    def run(collector):
        engine = SimulatedEngine(slow_prompts(0), step=1.0)
        return simulate(collector, engine, 5, 2, 1)

    late = trained_prompts(run(PartialCollector(1.5, max_staleness=4)))
    early = run(PartialTailCollector(1.5, max_staleness=4, trigger_size=1))
    assert [place for place, ids in enumerate(late) if "0" in ids] == [4]
    assert trained_prompts(early)[:2] == [["1", "2"], ["0", "3"]]
    slow = next(r for g in early.batches[1] for r in g if r.prompt.id == "0")
    assert slow.versions == [0] * 5 + [1] * 95  # kept what it had


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TailBatchingCollector(trigger_size=0), "trigger_size=0 must be >= 1"),
        (lambda: TailBatchingCollector(candidate_step=0), "candidate_step=0 must be >= 1"),
        (
            lambda: PartialTailCollector(max_staleness=2, candidate_step=3),
            "candidate_step=3 must be <= max_staleness=2",
        ),
    ],
)
def test_impossible_tails_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_too_seldom_synced_is_an_error_and_no_hang():
    class Never(SimulatedEngine):
        def load_weights(self, weights, version):
            pass

    with pytest.raises(
        ConfigError, match=r"iteration 3 may train on no token older than version 1"
    ):
        simulate(AsyncCollector(1), Never(lengths(5)), 5)


class Breaks(SimulatedEngine):
    """Fails in the middle."""

    left = 7

    async def generate(self, token_ids, sampling, seed):
        self.left -= 1
        if self.left == 0:
            raise EngineError("out of memory")
        return await super().generate(token_ids, sampling, seed)


@pytest.mark.parametrize(
    "make", [SyncCollector, StreamedCollector, AsyncCollector, OneStepOffCollector,
             PartialCollector, PartialTailCollector, TailBatchingCollector],
)  # fmt: skip
def test_an_engine_that_fails_is_heard_of_and_its_groups_are_kept(make):
    collector, prompts = make(), CountedPrompts()
    with pytest.raises(EngineError, match="out of memory"):
        simulate(collector, Breaks(heavy), 5, 4, 2, prompts=prompts, train_seconds=lambda _: 1.0)
    state = collector.state_dict()
    kept = {group[0]["prompt"]["id"] for group in state["groups"]}
    # Nothing was trained on before the seventh request, so all that was drawn is kept.
    assert kept == {str(n) for n in range(prompts.drawn)}
    # The same collector serves another run, which begins with them.
    result = simulate(collector, SimulatedEngine(heavy), 2, 4, 2, prompts=prompts)
    trained = [group[0].prompt.id for groups in result.batches for group in groups]
    assert len(set(trained)) == 8
    assert set(trained) <= kept | {str(n) for n in range(12)}


def test_nothing_is_issued_while_an_evaluation_has_the_engine():
    async def run():
        engine = SimulatedEngine(lengths(10), step=1.0)
        pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([lambda **_: []]), None)
        prompts = CountedPrompts()
        source = GroupSource(prompts, 2, 1, Sampling())
        collector = AsyncCollector(max_staleness=3)
        collector.bind(pipeline, source)
        collector._active, collector._missing = True, 2
        async with collector.yielding():
            collector._fill()
            assert prompts.drawn == 0
        assert prompts.drawn == 8
        await collector.close()

    run_virtual(run())


def test_a_simulation_that_would_hang_says_so():
    async def waits_for_nobody():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(EngineError, match="hangs"):
        run_virtual(waits_for_nobody())


async def nothing(completions):
    return [0.0] * len(completions)


def ready_to_take(collector, engine, num_groups, reward=nothing):
    """Bound to a pipeline and a source, to call a collector's own methods."""

    class Undecoded(RolloutPipeline):
        def _decode(self, rollouts):
            pass

    pipeline = Undecoded(engine, SingleTurn(), Rewards([reward]), None)
    collector.bind(pipeline, GroupSource(CountedPrompts(), num_groups, 1, Sampling()))
    return collector


def test_what_is_in_flight_and_what_waits():
    async def run():
        # There is room for two batches of two: prompts 0 and 2 take 10 s, 1 and 3 take 20.
        engine = SimulatedEngine(lambda prompt, seed: 20 if prompt % 2 else 10, step=1.0)
        collector = ready_to_take(AsyncCollector(max_staleness=1), engine, 2)
        taken = await collector.take(2)
        assert [group[0].prompt.id for group in taken] == ["0", "2"]
        assert collector.metrics() == {"collect/in_flight": 2, "collect/waiting": 0}
        collector.ack(taken)
        engine.load_weights([], version=1)
        await collector.after_sync()  # now 4 and 5 may begin, after 10 of 1's and 3's 20 s
        await asyncio.sleep(15)
        assert collector.metrics() == {"collect/in_flight": 1, "collect/waiting": 3}
        await collector.close()

    run_virtual(run())


def test_an_interrupted_batch_leaves_the_engine_paused_for_the_trainer():
    async def run():
        engine = SimulatedEngine(lengths(50), step=1.0)
        collector = ready_to_take(PartialCollector(over_issue=1.5), engine, 2)
        task = asyncio.create_task(collector.take(2))
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        written = engine.tokens
        await asyncio.sleep(5)
        await engine.resume()  # brings the count up to date
        assert engine.tokens == pytest.approx(written) == pytest.approx(3 * 5)
        await collector.close()
        assert len(collector.state_dict()["groups"]) == 3

    run_virtual(run())


def test_the_first_failure_in_the_background_is_the_one_told():
    class Dies(SimulatedEngine):
        async def generate(self, token_ids, sampling, seed):
            if token_ids[0] > 0:
                await asyncio.sleep(5 + token_ids[0])
                raise EngineError(f"prompt {token_ids[0]} broke it")
            return await super().generate(token_ids, sampling, seed)

    async def run():
        engine = Dies(lengths(2), step=1.0)
        collector = ready_to_take(AsyncCollector(max_staleness=3), engine, 1)
        collector.ack(await collector.take(1))
        await asyncio.sleep(30)
        with pytest.raises(EngineError, match="prompt 1 broke it"):
            await collector.take(1)
        await collector.close()

    run_virtual(run())


@pytest.mark.parametrize(
    ("make", "max_staleness"),
    [(AsyncCollector, 0), (AsyncCollector, 1), (AsyncCollector, 3), (PartialCollector, 2)],
)
def test_the_collectors_schedule_pushes_as_seldom_as_staleness_allows(make, max_staleness):
    result = simulate(
        make(max_staleness=max_staleness), SimulatedEngine(heavy), 12, 4, 2, lambda _: 20.0, 1.0,
        schedule=CollectorSchedule(), ahead=True,
    )  # fmt: skip
    # Version 0 is good for iterations 0 to max_staleness, the next push for as many.
    assert result.pushes == list(range(max_staleness + 1, 13, max_staleness + 1))
    assert max(result.staleness) == max_staleness


def test_a_collector_whose_take_has_other_arguments_is_refused():
    message = r"Waves\.take.* must have the signature take\(self, count\)"
    with pytest.raises(ConfigError, match=message):

        class Waves(Collector):
            async def take(self, pipeline, source, count):
                return [self.issue(source) for _ in range(count)]


def test_a_group_that_has_not_begun_is_copied_once_whatever_its_size(monkeypatch):
    copied = []
    to_dict = Rollout.to_dict
    monkeypatch.setattr(Rollout, "to_dict", lambda self: copied.append(self.id) or to_dict(self))
    collector = SyncCollector()
    collector.bind(None, GroupSource(CountedPrompts(), 3, 4, Sampling(temperature=0.5)))
    groups = [collector.issue() for _ in range(3)]
    groups[1][2].rows[0].append_written([7], [-0.5], [0])
    state = collector.state_dict()
    # One record for four rollouts, but of a group that has begun: 1 + 4 + 1.
    assert copied == [rollout.id for rollout in (groups[0][0], *groups[1], groups[2][0])]
    assert [len(records) for records in state["groups"]] == [1, 4, 1]
    again = SyncCollector()
    again.load_state_dict(json.loads(json.dumps(state)))
    again.bind(None, None)
    restored = [again.issue() for _ in range(3)]
    assert restored == groups
    # Whoever changes one changes no other.
    restored[0][0].prompt.columns["answer"] = restored[0][0].prompt.token_ids.append(9)
    assert restored[0][1:] == groups[0][1:]


def test_rollouts_that_have_not_begun_when_a_batch_is_broken_off_ask_nothing():
    class Told(Exception):
        """Stands for a signal."""

    class Blocks(SimulatedEngine):
        asked = 0

        async def generate(self, token_ids, sampling, seed):
            self.asked += 1
            with suppress(asyncio.CancelledError):
                while self.asked == 3:  # until the wait is broken off, the loop does not turn
                    require_awaited()
            return await asyncio.get_running_loop().create_future()

    def guard():
        if engine.asked == 3 and not told:
            told.append(True)
            raise Told

    engine, told = Blocks(lengths(1)), []
    collector = ready_to_take(SyncCollector(), engine, 20)
    runtime.guard = guard
    try:
        with pytest.raises(Told):
            run_async(collector.take(20))
    finally:
        runtime.guard = None
    assert engine.asked == 3
    assert len(collector.state_dict()["groups"]) == 20
