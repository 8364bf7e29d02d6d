"""Test the way from rollouts to one batch, and from that to minibatches and micro-batches."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict

from lightning_rl.data.batch import select, token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import split_micro_batches, split_minibatches
from lightning_rl.errors import ConfigError


@pytest.fixture
def batch(make_rollout) -> TensorDict:
    return pack_rollouts(
        [
            make_rollout(
                [5, 6],
                [7, 8, 1],
                group_id="b",
                logprobs=[-0.5, 0.0, -1.5],
                loss_mask=[True, False, True],
                versions=[3, -1, 4],
                reward=0.25,
                temperature=0.7,
            ),
            make_rollout(
                [9], [4], group_id="a", logprobs=[-2.0], versions=[4], finish_reason="length"
            ),
            make_rollout([5, 6], [1], group_id="b", logprobs=[-3.0], versions=[4], reward=1.0),
        ]
    )


def test_every_field_of_a_packed_batch(batch):
    tokens, rollouts = batch["tokens"], batch["rollouts"]
    assert tokens["input_ids"].tolist() == [5, 6, 7, 8, 1, 9, 4, 5, 6, 1]
    mask = [False, False, True, False, True, False, True, False, False, True]
    assert tokens["loss_mask"].tolist() == mask
    expected = [0, 0, -0.5, 0, -1.5, 0, -2.0, 0, 0, -3.0]
    assert tokens["rollout_logprobs"].tolist() == expected
    assert tokens["versions"].tolist() == [-1, -1, 3, -1, 4, -1, 4, -1, -1, 4]
    assert rollouts["length"].tolist() == [5, 2, 3]
    assert rollouts["prompt_length"].tolist() == [2, 1, 2]
    assert rollouts["prefix"].tolist() == [0, 1, 0]
    assert rollouts["group"].tolist() == [0, 1, 0]
    assert rollouts["truncated"].tolist() == [False, True, False]
    assert rollouts["reward"].tolist() == [0.25, 0.0, 1.0]
    assert rollouts["temperature"].tolist() == pytest.approx([0.7, 1.0, 1.0])
    assert token_rows(batch).tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_one_prompt_in_two_groups_is_one_prefix_but_two_groups(make_rollout):
    batch = pack_rollouts(
        [make_rollout([5], [1], group_id="a"), make_rollout([5], [1], group_id="b")]
    )
    assert batch["rollouts", "prefix"].tolist() == [0, 0]
    assert batch["rollouts", "group"].tolist() == [0, 1]


def test_select_takes_whole_rollouts_in_the_order_asked_for(batch):
    part = select(batch, torch.tensor([2, 0]))
    assert part["tokens", "input_ids"].tolist() == [5, 6, 1, 5, 6, 7, 8, 1]
    assert part["tokens", "rollout_logprobs"].tolist() == [0, 0, -3.0, 0, 0, -0.5, 0, -1.5]
    assert part["rollouts", "reward"].tolist() == [1.0, 0.25]
    assert token_rows(part).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_select_of_a_permutation_is_not_the_batch_itself(batch):
    assert select(batch, torch.tensor([1, 0, 2]))["rollouts", "length"].tolist() == [2, 5, 3]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def groups_of(batch: TensorDict, parts: list[torch.Tensor]) -> list[set[int]]:
    return [set(batch["rollouts", "group"][part].tolist()) for part in parts]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 8), data=st.data())
def test_minibatches_hold_each_rollout_once_and_whole_groups(random_batch, seed, groups, data):
    count = data.draw(st.integers(1, groups))
    batch = random_batch(seed, groups=groups, group_size=2)
    parts = split_minibatches(batch, count, generator(seed))
    assert len(parts) == count
    assert sorted(torch.cat(parts).tolist()) == list(range(2 * groups))
    members = groups_of(batch, parts)
    assert sum(len(m) for m in members) == groups  # no group in two parts
    sizes = [len(m) for m in members]
    assert max(sizes) - min(sizes) <= 1


def test_minibatches_follow_the_generator(random_batch):
    batch = random_batch(0, groups=8)
    first, again, other = (split_minibatches(batch, 4, generator(s)) for s in (1, 1, 2))
    assert groups_of(batch, first) == groups_of(batch, again)
    assert groups_of(batch, first) != groups_of(batch, other)


def test_more_minibatches_than_groups_is_refused(random_batch):
    with pytest.raises(ConfigError, match=r"minibatches=3 exceeds the 2 groups.*lower minibatches"):
        split_minibatches(random_batch(0, groups=2), 3, generator(0))


def forward_tokens(batch: TensorDict, rows: torch.Tensor) -> int:
    """Count a micro-batch's tokens: every distinct prompt once, and all completions."""
    prompts, cost = {}, 0
    for row in rows.tolist():
        rollout = batch["rollouts"][row]
        prompts[int(rollout["prefix"])] = int(rollout["prompt_length"])
        cost += int(rollout["length"] - rollout["prompt_length"])
    return cost + sum(prompts.values())


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 6), budget=st.integers(1, 120))
def test_micro_batches_hold_each_rollout_once_within_the_budget(random_batch, seed, groups, budget):
    batch = random_batch(seed, groups=groups)
    micro_batches = split_micro_batches(batch, budget)
    assert sorted(torch.cat(micro_batches).tolist()) == list(range(3 * groups))
    for micro_batch in micro_batches:
        assert len(micro_batch) == 1 or forward_tokens(batch, micro_batch) <= budget


def test_a_shared_prompt_is_paid_for_once(make_rollout):
    # A prompt of 6 and three completions of 2: 12 forward tokens, not 24.
    batch = pack_rollouts([make_rollout([3, 4, 5, 6, 7, 8], [9, 1]) for _ in range(3)])
    assert [p.tolist() for p in split_micro_batches(batch, 12)] == [[0, 1, 2]]
    # One less, and the third needs a new micro-batch, where the prompt counts again.
    assert sorted(len(p) for p in split_micro_batches(batch, 11)) == [1, 2]


def test_micro_batches_are_about_equally_full(make_rollout):
    # Five rollouts of 10 tokens: four fit at once, and none of the two micro-batches needs more
    # than three.
    batch = pack_rollouts([make_rollout([n], [n] * 9) for n in range(3, 8)])
    assert [len(micro_batch) for micro_batch in split_micro_batches(batch, 40)] == [3, 2]
    assert [len(micro_batch) for micro_batch in split_micro_batches(batch, 40, even=False)] == [
        4,
        1,
    ]


def test_a_rollout_longer_than_the_budget_is_a_micro_batch_of_its_own(make_rollout):
    batch = pack_rollouts(
        [make_rollout([3], [4]), make_rollout([5] * 20, [6] * 10), make_rollout([7], [8])]
    )
    assert sorted(p.tolist() for p in split_micro_batches(batch, 8)) == [[0, 2], [1]]
