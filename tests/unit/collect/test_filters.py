"""Filters and dynamic sampling: what is kept, what takes a rejected group's place, when it ends."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from lightning_rl.agents.base import SingleTurn
from lightning_rl.algos.baselines import ReMax
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import GroupFilter, RewardSpread, SyncCollector
from lightning_rl.collect.loader import trainable
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline, in_groups
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.collect.selection import GroupSelection, SelectedGroups
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, FilterError, LightningRLError
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import RolloutStatus
from tests.support.engine_checks import FakeEngine


def group_of(make_rollout, *rewards, **fields):
    return [make_rollout([3], [1], reward=r, **fields) for r in rewards]


@pytest.mark.parametrize(
    ("rewards", "min_spread", "kept"),
    [
        ([0.0, 1.0], 0.0, True),
        ([1.0, 1.0], 0.0, False),
        ([0.0, 0.0, 0.0], 0.0, False),
        ([0.25, 0.5], 0.25, False),  # must exceed it
        ([0.25, 0.75], 0.25, True),
        ([-1.0, -0.5], 0.0, True),
        ([1.0], 0.0, False),
    ],
)
def test_reward_spread(make_rollout, rewards, min_spread, kept):
    assert RewardSpread(min_spread).keep(group_of(make_rollout, *rewards)) is kept


def test_reward_spread_looks_at_graded_rollouts_only(make_rollout):
    group = group_of(make_rollout, 1.0, 1.0, None)
    group[2].status = RolloutStatus.FAILED
    assert not RewardSpread().keep(group)
    failed = group_of(make_rollout, 0.0, 1.0, status=RolloutStatus.FAILED)
    assert not RewardSpread().keep(failed)


def test_reward_spread_of_one_part(make_rollout):
    """The rewards differ in form only, since all are wrong: nothing tells what is right."""
    group = group_of(make_rollout, 0.0, 0.1, 0.1)
    for rollout, form in zip(group, (0.0, 0.1, 0.1), strict=True):
        rollout.reward_parts = {"exact": 0.0, "form": form}
    assert RewardSpread().keep(group)
    assert RewardSpread(part="form").keep(group)
    assert not RewardSpread(part="exact").keep(group)
    group[0].reward_parts["exact"] = None  # does not apply to it
    assert not RewardSpread(part="exact").keep(group)
    group[1].reward_parts["exact"] = 1.0
    assert RewardSpread(part="exact").keep(group)
    with pytest.raises(ConfigError, match="no part of that name; use one of exact, form"):
        RewardSpread(part="exakt").keep(group)


# ---------------------------------------------------------------- dynamic sampling


class Dice(FakeEngine):
    """Writes one digit drawn from the request's seed, then the end token; on record."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.temperatures: list[float] = []

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.seeds.append(seed)
        self.temperatures.append(sampling.temperature)
        return Completion([3 + seed % 10, 1], [-1.0, -1.0], "stop", [0, 0])


class Noted(SyncCollector):
    """Writes down how many groups it was asked for."""

    def __init__(self, asked: list[int]) -> None:
        super().__init__()
        self.asked = asked

    async def take(self, count):
        self.asked.append(count)
        return await super().take(count)


class Collecting:
    """A pipeline over numbered prompts, of which only multiples of ``useful`` can spread."""

    stream = None

    def __init__(self, tiny_model, useful: int, rows: int = 30) -> None:
        tokenizer = load_tokenizer(str(tiny_model))
        data = [{"prompt": f"{n}=", "number": n} for n in range(1, rows + 1)]
        self.prompts = IterablePrompts(data, shuffle=False)
        self.prompts.load(tokenizer)
        self.engine = Dice()
        self.drawn: list[int] = []

        def reward(completion_ids, number):
            counts = range(len(completion_ids))
            return [float(n % useful == 0 and i == 0) for i, n in zip(counts, number, strict=True)]

        self.pipeline = RolloutPipeline(self.engine, SingleTurn(), Rewards([reward]), tokenizer)
        self.collector = Noted(self.drawn)

    def collect(self, filters, groups: int = 4, rounds: int = 10, iteration: int = 0, **options):
        sampling = Sampling(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5)
        source = GroupSource(self.prompts, groups, 3, sampling, seed=4)
        selection = GroupSelection(list(filters), rounds, **options)
        parts = self.pipeline, self.collector, source, selection
        batches = Collection(*parts, stream=self.stream)
        batches.collect(iteration)
        batches.ack()
        return batches


def numbers(rollouts) -> list[int]:
    return [r.prompt.columns["number"] for r in rollouts]


def test_without_filters_one_round_is_all(tiny_model):
    run = Collecting(tiny_model, useful=100)
    collection = run.collect(filters=[], rounds=1)
    assert run.drawn == [4]
    assert collection.rollouts == collection.generated
    assert {r.status for r in collection.rollouts} == {RolloutStatus.COMPLETED}
    assert collection.metrics() == {}


def test_rejected_groups_are_replaced_by_groups_of_new_prompts(tiny_model):
    run = Collecting(tiny_model, useful=3)
    collection = run.collect([RewardSpread()])
    # 1 2 [3] 4, 5 [6] 7 for those that are rejected, 8 [9] for these, and so on until [12].
    assert run.drawn == [4]
    assert numbers(collection.rollouts) == [n for n in (3, 6, 9, 12) for _ in range(3)]
    assert numbers(collection.generated) == [n for n in range(1, 13) for _ in range(3)]
    assert collection.metrics() == {"filter/RewardSpread": 8.0}
    for rollout in collection.generated:
        kept = rollout.prompt.columns["number"] % 3 == 0
        assert rollout.status is (RolloutStatus.COMPLETED if kept else RolloutStatus.SKIPPED)
        assert rollout.reward is not None  # rejected ones keep what they were rejected for
        sampling = rollout.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)


def test_ids_and_seeds_never_repeat_within_an_iteration_nor_after(tiny_model):
    run = Collecting(tiny_model, useful=3, rows=5)  # so few that prompts come again
    first = run.collect([RewardSpread()], iteration=0, rounds=30)
    assert len(first.generated) > 5 * 3
    assert len(set(numbers(first.generated))) == 5
    second = run.collect([RewardSpread()], iteration=1, rounds=30)
    for collection in (first, second):
        ids = [r.id for r in collection.generated]
        assert len(set(ids)) == len(ids)
        by_group = {r.group_id: r.prompt.id for r in collection.generated}
        assert len(by_group) == len(ids) / 3
    both = first.generated + second.generated
    assert len({r.id for r in both}) == len(both)
    assert len(set(run.engine.seeds)) == len(run.engine.seeds) == len(both)
    assert sorted(r.seed for r in both) == sorted(run.engine.seeds)


def test_the_same_run_again_is_the_same(tiny_model):
    runs = [Collecting(tiny_model, useful=3).collect([RewardSpread()]) for _ in range(2)]
    assert [r.to_dict() for r in runs[0].generated] == [r.to_dict() for r in runs[1].generated]


def test_too_few_good_groups_end_with_a_clear_error(tiny_model):
    run = Collecting(tiny_model, useful=3)
    message = (
        r"of 8 groups generated only 2 of groups_per_iteration=4 groups passed the filters "
        r"\(RewardSpread rejected 6\).*raise selection.max_batches"
    )
    with pytest.raises(FilterError, match=message) as error:
        run.collect([RewardSpread()], rounds=2)
    assert isinstance(error.value, LightningRLError)


def test_a_batch_may_be_made_up_of_what_was_rejected(tiny_model):
    run = Collecting(tiny_model, useful=3)
    with pytest.warns(UserWarning, match=r"2 of groups_per_iteration=4 .* filters rejected"):
        collection = run.collect([RewardSpread()], rounds=2, fill_with_rejected=True)
    # The useful ones of 1 to 8 are [3] and [6], and the last that were rejected
    assert numbers(collection.rollouts) == [n for n in (3, 6, 7, 8) for _ in range(3)]
    assert {r.status for r in collection.rollouts} == {RolloutStatus.COMPLETED}
    assert collection.metrics() == {"filter/RewardSpread": 6.0, "filter/made_up": 2.0}
    skipped = [r for r in collection.generated if r.status is RolloutStatus.SKIPPED]
    assert numbers(skipped) == [n for n in (1, 2, 4, 5) for _ in range(3)]
    # Each completion has two tokens; 4 of 8 groups went to waste.
    _, metrics = collection.of_all_ranks(0)
    wasted = {name: share for name, share in metrics.items() if "wasted" in name}
    assert wasted == {
        "rollout/wasted_share": 0.5,
        "rollout/wasted_by_filters": 0.5,
        "rollout/wasted_by_aborts": 0.0,
        "rollout/wasted_by_errors": 0.0,
    }
    # Of what is useful alone, nothing is made up; where nothing is, everything.
    assert run.collect([], iteration=1, fill_with_rejected=True).metrics() == {
        "filter/made_up": 0.0
    }
    nobody = Collecting(tiny_model, useful=100)
    with pytest.warns(UserWarning, match="4 of groups_per_iteration=4"):
        nothing = nobody.collect([RewardSpread()], rounds=2, fill_with_rejected=True)
    assert numbers(nothing.rollouts) == [n for n in (5, 6, 7, 8) for _ in range(3)]


def test_no_replacement_begins_after_the_deadline(tiny_model):
    run = Collecting(tiny_model, useful=3)
    with pytest.warns(UserWarning, match="3 of groups_per_iteration=4"):
        collection = run.collect([RewardSpread()], seconds=0.0, fill_with_rejected=True)
    assert len(collection.generated) == 4 * 3
    assert numbers(collection.rollouts) == [n for n in (3, 1, 2, 4) for _ in range(3)]
    with pytest.raises(FilterError, match=r"of 4 groups .* only 1 of .* set selection.fill_with"):
        run.collect([RewardSpread()], seconds=0.0, iteration=1)


@pytest.mark.parametrize(
    ("collector", "streams"),
    [
        (SyncCollector(), False),
        (StreamedCollector(), False),
        (StreamedCollector(), True),
        (AsyncCollector(max_staleness=0), False),
    ],
)
def test_replacements_that_are_still_written_at_the_deadline_are_evicted(
    tiny_model, collector, streams
):
    class Stalls(Dice):
        async def generate(self, token_ids, sampling, seed):
            if len(self.seeds) in (4 * 3, 6 * 3):  # 6 is written, 5 and 7 never are
                self.seeds.append(seed)
                await asyncio.get_running_loop().create_future()
            return await super().generate(token_ids, sampling, seed)

    run = Collecting(tiny_model, useful=3)
    run.pipeline.engine, run.collector = Stalls(), collector
    if streams:
        run.stream = SimpleNamespace(begin=range, add=list, first=frozenset())
    with pytest.warns(UserWarning, match="2 of groups_per_iteration=4"):
        found = run.collect([RewardSpread()], seconds=0.5, fill_with_rejected=True)
    # 1 2 [3] 4, and of their replacements 5 [6] 7 what is finished
    assert Counter(numbers(found.rollouts)) == {3: 3, 6: 3, 2: 3, 4: 3}
    assert all(r.status is RolloutStatus.COMPLETED and r.completion for r in found.rollouts)
    expired = [r for r in found.generated if r.status is RolloutStatus.EXPIRED]
    assert numbers(expired) == [n for n in (5, 7) for _ in range(3)]
    state = found.state_dict()
    assert [prompt["columns"]["number"] for prompt in state["source"]["again"]] == [5, 7]
    assert state["collector"] == {"groups": []}


def test_a_rejected_group_is_replaced_while_others_are_written(tiny_model):
    """The batch is the same in whatever order groups end, and none waits for a slow one."""

    class Slow(Dice):
        """The first three requests, of prompt 1, end when 5 has been asked for."""

        async def generate(self, token_ids, sampling, seed):
            made = await super().generate(token_ids, sampling, seed)
            place = len(self.seeds)
            if place > 4 * 3:
                later.set()
            elif place <= 3:
                await later.wait()
            return made

    later = asyncio.Event()
    whole = Collecting(tiny_model, useful=3).collect([RewardSpread()])
    run = Collecting(tiny_model, useful=3)
    run.pipeline.engine = Slow()
    found = run.collect([RewardSpread()])
    assert [r.to_dict() for r in found.generated] == [r.to_dict() for r in whole.generated]


class Even(GroupFilter):
    """A user's own filter: even numbers."""

    def keep(self, group) -> bool:
        return group[0].prompt.columns["number"] % 2 == 0


def test_all_filters_must_agree_and_each_counts_what_it_rejected_first(tiny_model):
    run = Collecting(tiny_model, useful=3)
    collection = run.collect([Even(), RewardSpread()], groups=2)
    # 1 2 | 3 4 | 5 6 | 7 | ... | 12
    assert numbers(collection.rollouts) == [6, 6, 6, 12, 12, 12]
    assert collection.metrics() == {"filter/Even": 6.0, "filter/RewardSpread": 4.0}
    assert collection.selection.tell() == "Even rejected 6, RewardSpread rejected 4"


def test_a_kept_group_keeps_its_failures_for_what_they_are(tiny_model, make_rollout):
    selection = SelectedGroups(None, GroupSelection([RewardSpread()]))
    group = group_of(make_rollout, 1.0, 1.0, None)
    group[2].status = RolloutStatus.FAILED
    selection.add([group])
    assert [r.status.value for r in group] == ["skipped", "skipped", "failed"]
    assert selection.kept == []


def test_a_collection_that_failed_is_gone_on_with_as_it_was(tiny_model):
    whole = Collecting(tiny_model, useful=3).collect([RewardSpread()], rounds=10)

    def batches(run, rounds):
        sampling = Sampling(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5)
        source = GroupSource(run.prompts, 4, 3, sampling, seed=4)
        return Collection(
            run.pipeline, SyncCollector(), source, GroupSelection([RewardSpread()], rounds)
        )

    first = batches(Collecting(tiny_model, useful=3), rounds=2)
    with pytest.raises(FilterError):
        first.collect(0)
    second = batches(Collecting(tiny_model, useful=3), rounds=10)
    second.load_shares([json.loads(json.dumps(first.state_dict()))])
    again = second.collect(0)
    assert [r.to_dict() for r in again] == [r.to_dict() for r in whole.rollouts]
    second.ack()
    assert second.state_dict()["collector"] == {"groups": []}


def test_each_group_may_have_a_greedy_rollout_that_counts_as_a_baseline_alone(tiny_model):
    run = Collecting(tiny_model, useful=1)  # the first of each group is right
    source = GroupSource(run.prompts, 2, 3, Sampling(temperature=0.7), seed=4, plan=ReMax())
    collection = Collection(run.pipeline, run.collector, source)
    run.collector.issue()
    state = run.collector.state_dict()
    run.collector.load_state_dict(state)  # what was begun, greedy rollout and all, comes first
    rollouts = collection.collect(0)
    found = [(r.trained, r.sampling.temperature, r.graded) for r in rollouts]
    assert found == [*[(True, 0.7, True)] * 3, (False, 0.0, False)] * 2
    assert sorted(run.engine.temperatures) == [0.0] * 2 + [0.7] * 6
    _, metrics = collection.of_all_ranks(0)
    assert metrics["rollout/completed"] == 6
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    finished = [r for group in in_groups(rollouts) for r in ReMax().finish(group)]
    batch = ReMax()(pack_rollouts(trainable(finished), finished))
    advantages = batch["tokens", "advantages"][batch["tokens", "loss_mask"]]
    assert advantages.tolist() == [1, 1, 0, 0, 0, 0] * 2
