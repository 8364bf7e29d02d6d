"""Test GRPO by hand, GAE against its recursion written as a plain loop."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_rl.algos.advantages import GAE, GRPO, gae, group_means, group_stds
from lightning_rl.data.packing import pack_rollouts


def grpo_batch(make_rollout, rewards, groups):
    rollouts = [
        make_rollout([3], [4, 1], reward=r, group_id=g)
        for r, g in zip(rewards, groups, strict=True)
    ]
    return pack_rollouts(rollouts)


def per_rollout(batch):
    """Return a number per rollout of one prompt token and two model tokens: (R, 3)."""
    return batch["tokens", "advantages"].reshape(-1, 3)


def test_grpo_without_std(make_rollout):
    batch = grpo_batch(make_rollout, [1, 0, 0, 0], "aaaa")
    advantages = per_rollout(GRPO(normalize_std=False)(batch))
    # mean 0.25; the prompt's token has none, both model tokens have the rollout's
    assert advantages.tolist() == [[0, 0.75, 0.75]] + [[0, -0.25, -0.25]] * 3


def test_grpo_with_std(make_rollout):
    batch = grpo_batch(make_rollout, [1, 0, 0, 0], "aaaa")
    advantages = per_rollout(GRPO()(batch))[:, 1]
    # mean 0.25, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, std 0.5
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_compares_within_groups_wherever_their_members_stand(make_rollout):
    batch = grpo_batch(make_rollout, [1, 5, 0, 7], "abab")
    advantages = per_rollout(GRPO(normalize_std=False)(batch))[:, 1]
    assert advantages.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_grpo_gives_nothing_to_a_group_without_spread_or_of_one(make_rollout):
    batch = grpo_batch(make_rollout, [1, 1, 0.3], "aab")
    assert not GRPO()(batch)["tokens", "advantages"].any()


def test_grpo_leaves_an_environments_tokens_alone(make_rollout):
    rollouts = [
        make_rollout([3], [4, 5, 1], reward=1.0, loss_mask=[True, False, True]),
        make_rollout([3], [1], reward=0.0),
    ]
    batch = GRPO(normalize_std=False)(pack_rollouts(rollouts))
    assert batch["tokens", "advantages"].tolist() == [0, 0.5, 0, 0.5, 0, -0.5]


def test_group_statistics_match_torch():
    rewards, group = torch.tensor([1.0, 2.0, 4.0, 8.0, 9.0]), torch.tensor([7, 2, 7, 2, 7])
    torch.testing.assert_close(group_means(rewards, group)[0], rewards[[0, 2, 4]].mean())
    torch.testing.assert_close(group_stds(rewards, group)[1], rewards[[1, 3]].std())


def recursion(rewards, values, gamma, lam):
    """Compute GAE of one rollout, as it stands in the paper."""
    advantages, carry, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carry = reward + gamma * after - value + gamma * lam * carry
        advantages.insert(0, carry)
        after = value
    return advantages


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_gae_is_the_backward_recursion(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.double, generator=generator)
    row = torch.repeat_interleave(torch.arange(len(lengths)) * 3, torch.tensor(lengths))
    advantages, returns = gae(rewards, values, row, gamma, lam)
    expected: list[float] = []
    for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True):
        expected += recursion(r.tolist(), v.tolist(), gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.double))
    torch.testing.assert_close(returns, advantages + values)


@pytest.mark.parametrize(
    ("token_rewards", "first", "last"),
    [
        # last: 1 - 0.25 = 0.75; first: 0.5 * 0.25 - 0.5 + 0.25 * 0.75 = -0.1875
        (None, -0.1875, 0.75),
        # last: 1 - 0.25 - 0.25 = 0.5; first: -0.125 + 0.5 * 0.25 - 0.5 + 0.25 * 0.5 = -0.375
        ([0.0, -0.125, 0.0, -0.25], -0.375, 0.5),
    ],
)
def test_gae_by_hand(make_rollout, token_rewards, first, last):
    # Model tokens are the 1st and the 3rd; the environment's between them is no step.
    batch = pack_rollouts([make_rollout([3], [4, 5, 1], reward=1.0, loss_mask=[True, False, True])])
    batch["tokens", "values"] = torch.tensor([9.0, 0.5, 9.0, 0.25])
    if token_rewards is not None:
        batch["tokens", "token_rewards"] = torch.tensor(token_rewards)
    batch = GAE(gamma=0.5, lam=0.5, whiten=False)(batch)
    assert batch["tokens", "advantages"].tolist() == [0, first, 0, last]
    assert batch["tokens", "returns"].tolist() == [0, first + 0.5, 0, last + 0.25]


def test_gae_with_lambda_one_is_the_reward_less_the_value(make_rollout):
    rollouts = [make_rollout([3], [4, 5, 1], reward=2.0), make_rollout([3, 4], [1], reward=-1.0)]
    batch = pack_rollouts(rollouts)
    batch["tokens", "values"] = torch.tensor([0, 0.1, 0.2, 0.3, 0, 0, 0.4])
    batch = GAE(gamma=1.0, lam=1.0, whiten=False)(batch)
    expected = [0, 1.9, 1.8, 1.7, 0, 0, -1.4]
    assert batch["tokens", "advantages"].tolist() == pytest.approx(expected)
    assert batch["tokens", "returns"].tolist() == pytest.approx([0, 2, 2, 2, 0, 0, -1])


def test_whitening_counts_model_tokens_only(random_batch):
    batch = random_batch(5)
    mask = batch["tokens", "loss_mask"]
    generator = torch.Generator().manual_seed(0)
    batch["tokens", "values"] = torch.randn(len(mask), generator=generator)
    plain = GAE(whiten=False)(batch)["tokens", "advantages"].clone()
    white = GAE(whiten=True)(batch)["tokens", "advantages"]
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white[mask].std(unbiased=False)) == pytest.approx(1, abs=1e-5)
    assert not white[~mask].any()
    # The order of credit is the same: it is an affine map.
    assert torch.equal(white[mask].argsort(), plain[mask].argsort())
