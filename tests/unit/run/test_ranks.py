"""Test what several ranks share as far as one process can; see tests/integration/test_ddp.py."""

import json
from collections import Counter
from itertools import chain

import pytest
import torch

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.baselines import (
    OPMD,
    RLOO,
    MaxRL,
    PassAtK,
    ReinforcePlusPlus,
    RunningBaseline,
)
from lightning_rl.algos.objective import PromptMean, SequenceMean, TokenMean, TokenSum
from lightning_rl.algos.tree import TreeRLOO
from lightning_rl.algos.turns import GiGPO, RewardToGo, TurnGAE
from lightning_rl.collect.checks import check_groups
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.pipeline import GroupSource
from lightning_rl.data import splitting
from lightning_rl.data.batch import empty_like, select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.data.splitting import split_minibatches
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, FilterError
from lightning_rl.learn.skipped import has_zero_advantage, without
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.policy import Policy, load_tokenizer
from lightning_rl.rollout import Call
from lightning_rl.run.processes import dist
from tests.support.turn_rollouts import random_episodes, with_values


@pytest.fixture
def source(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))

    def make(rank: int = 0, ranks: int = 1) -> GroupSource:
        prompts = IterablePrompts(lambda: [{"prompt": f"{n}="} for n in range(7)], seed=3)
        prompts.load(tokenizer)
        return GroupSource(prompts, 6 // ranks, 2, Sampling(), seed=5, rank=rank, ranks=ranks)

    return make


def issued_ids(source: GroupSource, count: int) -> list[tuple[str, str]]:
    groups = [source.next() for _ in range(count)]
    return [(group[0].prompt.id, group[0].group_id) for group in groups]


def issued(source: GroupSource, count: int) -> list[tuple[str, int]]:
    return [(r.id, r.seed) for _ in range(count) for r in source.next()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_issue_what_one_process_does(source, ranks):
    alone, sources = source(), [source(rank, ranks) for rank in range(ranks)]
    for iteration in range(3):  # 18 draws of 7 prompts: into a third epoch
        for one in (alone, *sources):
            one.begin(iteration)
        shares = [issued(one, 6 // ranks) for one in sources]
        assert sorted(chain(*shares)) == sorted(issued(alone, 6))
        assert len({str(one.prompts.state_dict()) for one in (alone, *sources)}) == 1


def test_a_rank_that_lags_behind_draws_up_and_loses_no_prompt(source):
    fast, slow = source(0, 2), source(1, 2)
    quick = [fast.next()[0].prompt.id for _ in range(3)]
    late = [slow.next()[0].prompt.id]
    slow.catch_up(fast.drawn)
    fast.catch_up(fast.drawn)
    assert slow.prompts.state_dict() == fast.prompts.state_dict()
    late += [slow.next()[0].prompt.id for _ in range(2)]
    # The first six of the order, each once.
    assert sorted(quick + late) == sorted(p.id for p in source().prompts.draw(6))


def test_a_restored_source_goes_on(source):
    first = source(1, 2)
    first.next()
    first.catch_up(3)
    second = source(1, 2)
    second.load_state_dict(first.state_dict())
    assert second.drawn == 3
    assert issued(second, 4) == issued(first, 4)


def test_shares_are_put_together_in_the_order_of_places():
    assert dist.interleaved([[0, 2, 4], [1, 3]]) == [0, 1, 2, 3, 4]
    assert dist.interleaved([[0, None], []]) == [0, None]


def test_shares_of_other_ranks_are_dealt_as_if_they_had_been_to_these():
    two = [[0, 2, 4], [1, 3]]
    assert dist.reshard(two, 0, 1) == [0, 1, 2, 3, 4]
    assert [dist.reshard(two, rank, 3) for rank in range(3)] == [[0, 3], [1, 4], [2]]
    uneven = [[0, 2, 4, 6], [1]]
    assert [dist.reshard(uneven, rank, 2) for rank in range(2)] == uneven  # as many: as it was


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (1, 3)])
def test_another_number_of_ranks_goes_on_as_one_process_does(source, before, after):
    alone = source()
    old = [source(rank, before) for rank in range(before)]
    for one in (alone, *old):
        one.begin(4)
        issued(one, 6 // one.ranks)
    states = json.loads(json.dumps([one.state_dict() for one in old]))
    new = [source(rank, after) for rank in range(after)]
    for one in new:
        one.load_shares(states)
    for iteration in (5, 6, 7):
        for one in (alone, *new):
            one.begin(iteration)
        shares = [issued(one, 6 // after) for one in new]
        assert sorted(chain(*shares)) == sorted(issued(alone, 6))


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 3), (1, 3)])
def test_no_prompt_is_lost_or_doubled_when_ranks_change(source, before, after):
    """The number changes within an iteration, with ranks that came to different places."""
    old = [source(rank, before) for rank in range(before)]
    seen = []
    for rank, one in enumerate(old):
        one.begin(2)
        seen += issued_ids(one, 1 + rank)
        one.give_back(one.next()[0].prompt)
    new = [source(rank, after) for rank in range(after)]
    for one in new:
        one.load_shares([other.state_dict() for other in old])
    for one in new:  # all that wait to be issued, and two more
        seen += issued_ids(one, len(one._again) + 2)
    # The last of the old ranks had drawn 1 + before times, and the others had to catch up.
    order = [p.id for p in source().prompts.draw((1 + before) * before + 2 * after)]
    assert Counter(prompt for prompt, _ in seen) == Counter(order)
    assert len({group for _, group in seen}) == len(seen)  # no two groups of one name


@pytest.fixture
def batches(source):
    """Collect with an engine per rank, or (``shared``) one that rank 0 feeds for all ``ranks``."""

    def make(rank: int, ranks: int, shared: bool = False) -> Collection:
        issuing = source() if shared else source(rank, ranks)
        return Collection(None, SyncCollector(), issuing)

    return make


def held(batches: Collection) -> list[str]:
    return [group[0]["group_id"] for group in batches.state_dict()["collector"]["groups"]]


def test_groups_in_hand_are_dealt_anew(batches):
    before = batches(0, 1)
    for _ in range(5):
        before.collector.issue()
    state = json.loads(json.dumps(before.state_dict()))
    names = held(before)
    after = [batches(rank, 2) for rank in range(2)]
    for one in after:
        one.load_shares([state])
    assert [held(one) for one in after] == [names[::2], names[1::2]]
    back = batches(0, 1)
    back.load_shares([one.state_dict() for one in after])
    assert held(back) == names


def test_an_engine_for_all_ranks_has_its_groups_on_rank_0(batches):
    """No group is lost on the way to engines of their own, or back."""
    shared = [batches(rank, 2, shared=True) for rank in range(2)]
    for _ in range(4):
        shared[0].collector.issue()
    names = held(shared[0])
    own = [batches(rank, 2) for rank in range(2)]
    for one in own:
        one.load_shares([other.state_dict() for other in shared])
    assert [held(one) for one in own] == [names[::2], names[1::2]]
    assert own[0].source.prompts.state_dict() == shared[0].source.prompts.state_dict()
    again = batches(0, 2, shared=True)
    again.load_shares([one.state_dict() for one in own])
    assert held(again) == names


def test_groups_must_be_shared_evenly(monkeypatch):
    check_groups(4, 4)
    with pytest.raises(ConfigError, match="minibatches=5 exceeds groups_per_iteration=4;"):
        check_groups(4, 5)
    monkeypatch.setattr("lightning_rl.collect.checks.world_size", lambda: 2)
    check_groups(4, 4)  # a rank may have no group in a minibatch
    with pytest.raises(ConfigError, match=r"=5 cannot be divided among 2 processes; make it a"):
        check_groups(5, 1)
    with pytest.raises(ConfigError, match="minibatches=5 exceeds groups_per_iteration=4;"):
        check_groups(4, 5)


def test_a_silent_micro_batch_leaves_the_batch_as_it_is(make_rollout):
    batch = GRPO()(pack_rollouts([make_rollout([3], [4, 1])]))
    assert empty_like(batch)["tokens", "loss_mask"].tolist() == [False, False, False]
    assert batch["tokens", "loss_mask"].tolist() == [False, True, True]


# -------------------------------------------------------------------- minibatches of several ranks


@pytest.fixture
def dealt(make_rollout, monkeypatch):
    """Return each rank's minibatches as group names; ``lost`` groups have no graded rollout."""

    def deal(groups: int, ranks: int, minibatches: int, lost: set[int]) -> list[list[set[str]]]:
        shares = []
        for rank in range(ranks):
            places = range(rank, groups, ranks)
            collected = [make_rollout([3], [4], group_id=str(p)) for p in places for _ in "ab"]
            kept = [r for r in collected if int(r.group_id) not in lost]
            shares.append((pack_rollouts(kept, among=collected), [r.group_id for r in kept]))
        everyones = [
            (batch["rollouts", "group"].unique() * ranks + rank).tolist()
            for rank, (batch, _) in enumerate(shares)
        ]
        monkeypatch.setattr(splitting, "world_size", lambda: ranks)
        monkeypatch.setattr(splitting, "gather", lambda own: everyones)
        found = []
        for rank, (batch, names) in enumerate(shares):
            monkeypatch.setattr(splitting, "rank", lambda rank=rank: rank)
            parts = split_minibatches(batch, minibatches, torch.Generator().manual_seed(1))
            assert sorted(torch.cat(parts).tolist()) == list(range(len(names)))
            found.append([{names[row] for row in part.tolist()} for part in parts])
        return found

    return deal


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("minibatches", [2, 4, 5])
@pytest.mark.parametrize("lost", [set(), {1}, {0, 7}])
def test_ranks_together_deal_what_one_process_does(dealt, ranks, minibatches, lost):
    [alone], together = dealt(12, 1, minibatches, lost), dealt(12, ranks, minibatches, lost)
    assert [set().union(*shares) for shares in zip(*together, strict=True)] == alone
    assert sum(map(len, alone)) == 12 - len(lost)


def test_a_rank_may_have_no_group_in_a_minibatch(dealt):
    together = dealt(4, 2, 4, set())
    assert sorted(len(part) for part in together[0]) == [0, 0, 1, 1]


@pytest.mark.parametrize("rule", [TokenMean(), SequenceMean(), PromptMean(), TokenSum(4)])
def test_no_group_at_all_weighs_nothing(make_rollout, rule):
    batch = GRPO()(pack_rollouts([make_rollout([3], [4, 1], min_tokens=1, min_p=0.1)]))
    nothing = select(batch, torch.zeros(0, dtype=torch.long))
    assert rule(nothing).shape == (0,)
    assert rule.total(nothing, rule.weights(nothing)) == 0
    assert has_zero_advantage(nothing).shape == (0,)


@pytest.mark.parametrize(
    "advantage",
    [
        GRPO(), GAE(), RLOO(), MaxRL(), PassAtK(), OPMD(), ReinforcePlusPlus(), RunningBaseline(),
        ReinforcePlusPlus(group_baseline=True), TurnGAE(), RewardToGo(), GiGPO(), TreeRLOO(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recorded", [True, False])
def test_no_group_at_all_has_no_advantages(advantage, recorded, make_rollout):
    """A rank has none where nobody asked for a policy that learns on other ranks."""
    rollouts = random_episodes(0) if recorded else [make_rollout([3], [4, 1])]
    batch = with_values(pack_rollouts(rollouts))
    batch["tokens", "token_rewards"] = torch.zeros(len(batch["tokens"]))
    nothing = advantage(select(batch, torch.zeros(0, dtype=torch.long)))
    assert nothing["tokens", "advantages"].shape == (0,)


def test_no_group_at_all_is_scored(tiny_model, make_rollout):
    batch = pack_rollouts([make_rollout([3], [4, 1])])
    nothing = select(batch, torch.zeros(0, dtype=torch.long))
    Policy(str(tiny_model), SharedValueHead()).score(nothing, "old_logprobs", 100)
    for name in ("old_logprobs", "values"):
        assert nothing["tokens", name].shape == (0,)


def test_a_rank_without_a_group_scores_a_made_up_rollout(tiny_model, make_rollout):
    """The rollout has every column that there is, and a gradient of zero, which is not missing."""
    rollout = make_rollout(
        [3], [4, 1], temperature=0.7, top_k=3, min_p=0.1, repetition_penalty=1.2, min_tokens=1
    )
    rollout.calls = [Call(0, 0, 2, reward=0.5, state="s")]
    batch = GRPO()(pack_rollouts([rollout]))
    nothing = select(batch, torch.zeros(0, dtype=torch.long))
    made = without(nothing, has_zero_advantage(nothing))
    for part in ("tokens", "rollouts"):
        kinds = [
            {name: (x.dtype, x.shape[1:]) for name, x in one[part].items()} for one in (batch, made)
        ]
        assert kinds[0] == kinds[1]
    marks = {name: made["tokens", name].tolist() for name in ("call", "call_reward", "state")}
    assert marks == {"call": [-1, -1], "call_reward": [0, 0], "state": [-1, -1]}
    policy = Policy(str(tiny_model))
    scores = policy(made)
    assert len(scores.live) == 0
    scores.logprobs.sum().backward()
    gradients = [p.grad for p in policy.parameters()]
    assert all(grad is not None and not grad.any() for grad in gradients)


def test_tensors_are_summed_many_at_a_time(monkeypatch):
    sent = []

    def all_sum(flat):
        sent.append(flat.tolist())
        return 3 * flat

    monkeypatch.setattr(dist, "world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_sum", all_sum)
    monkeypatch.setattr(dist, "_BUCKET", 3)
    tensors = [torch.tensor(x) for x in ([[1.0], [2.0]], [3.0, 4.0], [5.0], [6.0])]
    dist.sum_over_ranks(tensors)
    assert sent == [[1, 2, 3, 4], [5, 6]]
    assert [t.tolist() for t in tensors] == [[[3], [6]], [9, 12], [15], [18]]


def test_one_process_talks_to_nobody():
    assert (dist.world_size(), dist.rank()) == (1, 0)
    assert dist.gather("a") == ["a"]
    assert dist.shard([1, 2, 3]) == dist.scatter([1, 2, 3]) == [1, 2, 3]
    assert dist.all_reduce_sum({"a": 2.0}) == {"a": 2.0}
    assert (dist.any_rank(True), dist.any_rank(False), dist.all_reduce_max(2.5)) == (
        True,
        False,
        2.5,
    )
    with pytest.raises(FilterError, match=r"^none passed$"), dist.every_rank():
        raise FilterError("none passed")
