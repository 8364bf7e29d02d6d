"""Test advantages that look at the batch or the past, and GAE with a reward per token."""

from statistics import stdev

import pytest
import torch

from lightning_rl.algos.advantages import GAE, Advantage
from lightning_rl.algos.baselines import GDPO, ReinforcePlusPlus, ReMax, RunningBaseline
from lightning_rl.algos.kl import K1Penalty
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout, Row, SamplingDistribution
from tests.support.algorithms import parts_of


def with_token_rewards(batch, seed: int):
    """Add a reward on every model token, such as a KL penalty's."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch["tokens", "loss_mask"]
    batch["tokens", "token_rewards"] = torch.randn(len(mask), generator=generator) * mask
    return batch


def turns(batch):
    """Return each rollout's reward, group, and places of model tokens, as plain Python numbers."""
    starts = [0, *batch["rollouts", "length"].cumsum(0).tolist()]
    mask = batch["tokens", "loss_mask"].tolist()
    for row, (reward, group) in enumerate(
        zip(batch["rollouts", "reward"].tolist(), batch["rollouts", "group"].tolist(), strict=True)
    ):
        yield reward, group, [i for i in range(starts[row], starts[row + 1]) if mask[i]]


# ---------------------------------------------------------------- a process without rollouts


@pytest.mark.parametrize("name", parts_of(Advantage))
def test_a_batch_without_rows_has_no_advantages(name):
    """All groups of a process may have failed, while others have some."""
    batch = pack_rollouts([])
    batch["tokens", "values"] = torch.zeros(0)
    assert parts_of(Advantage)[name](batch)["tokens", "advantages"].shape == (0,)


# ---------------------------------------------------------------- GDPO


def exact(completions):
    return [float(c[0]) for c in completions]


def form(completions):
    return [None if c[1] == "-" else float(c[1]) for c in completions]


def judge(completions):
    return [float(c) for c in completions]


def given(batch, advantage):
    """Return the advantage of each rollout, of a prompt token and one model token."""
    return advantage(batch)["tokens", "advantages"].reshape(-1, 2)[:, 1].tolist()


def test_gdpo_by_hand(make_rollout):
    """Two sets of prompts with their own rewards and weights, and what has no score."""
    sets = {
        "a": (Rewards([exact, form], [1.0, 0.5]), ["10", "01", "0-"]),
        "b": (Rewards([judge], [2.0]), ["0.25", "0.25", "1", "nan"]),  # the last one fails
    }
    rollouts = []
    for name, (rewards, texts) in sets.items():
        group = [make_rollout([3], [1], group_id=name, completion=t, reward=None) for t in texts]
        rewards.grade_here([group])
        rollouts += [Rollout.from_dict(r.to_dict()) for r in group if r.graded]  # as in a buffer
    rollouts.append(make_rollout([3], [1], group_id="given", demonstration=True))
    batch = pack_rollouts(rollouts)
    parts = batch["rollouts", "reward_parts"]
    none = torch.nan
    expected = [[1.0, 0.0, none], [0.0, 1.0, none], [0.0, none, none]]  # exact, form, judge
    expected += [[none, none, x] for x in (0.25, 0.25, 1.0)]
    expected = [[*row, 0.0] for row in expected] + [[none] * 4]
    assert torch.equal(parts.nan_to_num(9), torch.tensor(expected).nan_to_num(9))
    added = (batch["rollouts", "part_weights"] * parts.nan_to_num(0)).sum(1)
    assert added.tolist() == batch["rollouts", "reward"].tolist()
    # Two zeros and a one have the std 3^-1/2 and the normalised scores -1, -1, 2 times it; a zero
    # and a one those of 2^-1/2.
    s, h = 3**-0.5, 2**-0.5
    apart = [2 * s - h / 2, -s + h / 2, -s, -2 * s, -2 * s, 4 * s]
    found = given(batch, GDPO(eps=1e-12))
    assert found == pytest.approx([x / stdev(apart) for x in apart] + [0])


def test_gdpo_tells_apart_what_has_one_sum(make_rollout):
    """(1, 0) is rarer than (0, 1), and gets more; groups whose scores are equal get 0."""
    weights = {"a": 1.0, "b": 1.0}
    scores = [[(1, 0), (0, 1), (0, 0), (0, 1)], [(1, 1)] * 4]
    rollouts = [
        make_rollout([3], [1], group_id=str(g), reward=float(a + b), reward_weights=weights,
                     reward_parts={"a": float(a), "b": float(b)})
        for g, group in enumerate(scores) for a, b in group
    ]  # fmt: skip
    # a: std 1/2; b: std 3^-1/2
    s = 3**0.5 / 2
    apart = [1.5 - s, -0.5 + s, -0.5 - s, -0.5 + s, 0, 0, 0, 0]
    found = given(pack_rollouts(rollouts), GDPO(eps=1e-12))
    assert found == pytest.approx([x / stdev(apart) for x in apart])
    assert found[4:] == [0] * 4  # exactly, so that they are left out of the update


def test_gdpo_of_rewards_that_no_function_gave(make_rollout):
    """One reward is a role's own, and one was changed by a callback."""
    group = []
    for solver, critic in ((1.0, 0.5), (0.0, 0.25)):
        rollout = make_rollout([5], [1], reward=9.0, role="solver")
        rollout.rows.append(Row([6], [8], [True], [-1.0], [0], "critic"))
        rollout.role_rewards = {"solver": solver, "critic": critic}
        group.append(rollout)
    # All scores are 2^-1/2 deviations from their means; four of them have the std (2/3)^1/2.
    a = 0.75**0.5
    assert given(pack_rollouts(group), GDPO(eps=1e-12)) == pytest.approx([a, a, -a, -a])
    scored = {"reward_parts": {"exact": 1.0}, "reward_weights": {"exact": 2.0}}
    group = [make_rollout([5], [1], reward=reward, **scored) for reward in (2.0, 1.5)]
    batch = pack_rollouts(group)
    assert batch["rollouts", "reward_parts"].tolist() == [[1.0, 0.0], [1.0, -0.5]]
    assert given(batch, GDPO(eps=1e-12)) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_gdpo_refuses_what_it_cannot_do(tiny_model):
    with pytest.raises(ConfigError, match=r"GDPO\(eps=0.0\) must be > 0"):
        GDPO(eps=0.0)
    with pytest.raises(ConfigError, match="advantage=GDPO needs the reward as it was graded"):
        PolicyModule(str(tiny_model), advantage=GDPO(), kl_reward=K1Penalty())


# ---------------------------------------------------------------- ReMax


def test_remax_by_hand(make_rollout):
    """Each prompt has its own greedy rollout; that of c failed, that of d has a role's reward."""
    greedy = {"a": 0.5, "b": 1.0, "c": None, "d": 9.0}
    rewards = {"a": [1.0, 0.5], "b": [0.25], "c": [1.0], "d": [1.0]}
    groups = [
        [make_rollout([3], [1], group_id=name, reward=r, role="solver" * (name == "d")) for r in of]
        for name, of in rewards.items()
    ]
    made = [
        [*group, greedy_one(make_rollout, name, greedy[name])]
        for name, group in zip(rewards, groups, strict=True)
    ]
    made[-1][-1].role_rewards = {"solver": 0.75}
    finished = [r for group in made for r in ReMax().finish(group) if r.graded]
    assert given(pack_rollouts(finished), ReMax()) == [0.5, 0.0, -0.75, 0.0, 0.25]
    with pytest.raises(ConfigError, match="ReMax needs a greedy rollout in each group"):
        ReMax()(pack_rollouts([r for group in groups for r in group]))


def greedy_one(make_rollout, group: str, reward: float | None) -> Rollout:
    rollout = make_rollout([3], [1], group_id=group, reward=reward, trained=False)
    rollout.sampling = SamplingDistribution(temperature=0.0)
    return rollout


def test_remax_with_rewards_of_tokens_by_hand(make_rollout):
    rollout = make_rollout([3], [4, 5, 1], reward=1.0, loss_mask=[True, False, True])
    greedy = greedy_one(make_rollout, rollout.group_id, 0.5)
    batch = pack_rollouts(ReMax().finish([rollout, greedy])[:1])
    batch["tokens", "token_rewards"] = torch.tensor([0.0, -0.25, 0.0, -0.125])
    # 1 - 0.5, less what follows: 0.375 and 0.125
    assert ReMax()(batch)["tokens", "advantages"].tolist() == [0, 0.125, 0, 0.375]


# ---------------------------------------------------------------- REINFORCE++


def test_reinforce_plus_plus_by_hand(make_rollout):
    rollouts = [make_rollout([3], [1], reward=1.0), make_rollout([3], [4, 5, 1], reward=0.0)]
    tokens = ReinforcePlusPlus()(pack_rollouts(rollouts))["tokens", "advantages"].tolist()
    # Over tokens: mean 1/4, variance 3/16; (3/4) / (sqrt(3)/4) and (-1/4) / (sqrt(3)/4)
    low = -(3**-0.5)
    assert tokens == pytest.approx([0, 3**0.5, 0, low, low, low])


def test_reinforce_plus_plus_with_a_group_baseline_by_hand(make_rollout):
    rewards = {"a": [1.0, 0.0], "b": [5.0, 3.0]}
    rollouts = [make_rollout([3], [1], reward=r, group_id=g) for g in "ab" for r in rewards[g]]
    batch = ReinforcePlusPlus(group_baseline=True)(pack_rollouts(rollouts))
    # 0.5, -0.5, 1, -1: mean 0, variance 5/8
    expected = [x / (5 / 8) ** 0.5 for x in (0.5, -0.5, 1.0, -1.0)]
    assert batch["tokens", "advantages"].reshape(4, 2)[:, 1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [ReinforcePlusPlus(), GAE(lam=1.0)])
def test_rounding_is_not_blown_up_to_full_size_advantages(make_rollout, advantage):
    """Rewards 1 +- 1e-5 have a standard deviation of 1e-5: 1e-5 / sqrt(1e-10 + 1e-8) = 0.0995."""
    rollouts = [make_rollout([3], [1], reward=1 + 1e-5 * sign) for sign in (1, -1)]
    batch = pack_rollouts(rollouts)
    batch["tokens", "values"] = torch.zeros(len(batch["tokens"]))
    ours = advantage(batch)["tokens", "advantages"][batch["tokens", "loss_mask"]]
    # Rewards are float32, whose neighbours of 1 are 6e-8 and 1.2e-7 away: 1 part in 100 of 1e-5.
    assert ours.tolist() == pytest.approx([0.0995, -0.0995], rel=0.02)


def test_which_of_them_need_groups():
    assert ReinforcePlusPlus().min_group_size == 1
    assert ReinforcePlusPlus(group_baseline=True).min_group_size == 2
    assert RunningBaseline().min_group_size == 1
    assert (GDPO().min_group_size, GDPO().per_group) == (2, False)


@pytest.mark.parametrize("group_baseline", [False, True])
@pytest.mark.parametrize("token_rewards", [False, True])
def test_reinforce_plus_plus_in_float64(random_batch, group_baseline, token_rewards):
    batch = random_batch(21)
    own = [0.0] * len(batch["tokens"])
    if token_rewards:
        own = with_token_rewards(batch, 1)["tokens", "token_rewards"].tolist()
    rollouts = list(turns(batch))
    credit: dict[int, float] = {}
    for reward, group, places in rollouts:
        if group_baseline:
            peers = [r for r, g, _ in rollouts if g == group]
            reward -= sum(peers) / len(peers)
        for place in places:  # reward-to-go: what this token and later ones bring
            credit[place] = reward + sum(own[later] for later in places if later >= place)
    mean = sum(credit.values()) / len(credit)
    std = (sum((c - mean) ** 2 for c in credit.values()) / len(credit)) ** 0.5
    expected = [(credit[i] - mean) / std if i in credit else 0.0 for i in range(len(own))]
    ours = ReinforcePlusPlus(group_baseline)(batch)["tokens", "advantages"].tolist()
    assert ours == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_reinforce_plus_plus_in_any_order(random_rollouts):
    rollouts = random_rollouts(22)

    def per_rollout(arranged):
        batch = ReinforcePlusPlus(group_baseline=True)(pack_rollouts(arranged))
        parts = batch["tokens", "advantages"].split(batch["rollouts", "length"].tolist())
        return {r.id: part for r, part in zip(arranged, parts, strict=True)}

    straight, reverse = per_rollout(rollouts), per_rollout(rollouts[::-1])
    for name, part in straight.items():
        torch.testing.assert_close(reverse[name], part, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- the running baseline


def rewarded(make_rollout, *rewards):
    return pack_rollouts([make_rollout([3], [4, 1], reward=r) for r in rewards])


def test_the_running_baseline_over_three_batches(make_rollout):
    advantage = RunningBaseline(decay=0.8)
    credit = [
        advantage(rewarded(make_rollout, *rewards))["tokens", "advantages"].reshape(2, 3).tolist()
        for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0])
    ]
    # b: 0.5 (its own mean), then still 0.5, then 0.8 * 0.5 + 0.2 * 1 = 0.6
    assert credit[0] == [[0, 0.5, 0.5], [0, -0.5, -0.5]]
    assert credit[1] == [[0, 0.5, 0.5], [0, 0.5, 0.5]]
    for row, expected in zip(credit[2], (-0.6, 0.4), strict=True):
        assert row == pytest.approx([0, expected, expected])
    # 0.8 * 0.6 + 0.2 * 0.5
    assert advantage.baseline == pytest.approx(0.58)


def test_the_running_baseline_includes_rewards_of_tokens_and_spares_the_environment(make_rollout):
    batch = pack_rollouts([make_rollout([3], [4, 5, 1], reward=1.0, loss_mask=[True, False, True])])
    batch["tokens", "token_rewards"] = torch.tensor([0.0, -0.25, 0.0, -0.5])
    advantage = RunningBaseline(decay=0.0)
    advantage.load_state_dict({"baseline": 1.0})
    # 1 - 0.75 - 1
    assert advantage(batch)["tokens", "advantages"].tolist() == [0, -0.75, 0, -0.75]
    assert advantage.baseline == 0.25


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigError, match=rf"decay={decay}\) must be in \[0, 1\)"):
        RunningBaseline(decay)


def test_the_running_baseline_survives_a_checkpoint(tiny_model, make_rollout, train_on, tmp_path):
    batches = [rewarded(make_rollout, *r) for r in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0])]

    def module():
        return PolicyModule(str(tiny_model), advantage=RunningBaseline(decay=0.8))

    trainer = train_on(module(), batches[:2])
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = module()
    assert resumed.advantage.baseline is None
    train_on(resumed, batches[2:], tmp_path / "two.ckpt", max_epochs=2)
    assert resumed.iteration == 3
    assert resumed.advantage.baseline == pytest.approx(0.58)


# ---------------------------------------------------------------- GAE with a reward per token


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_gae_with_rewards_of_tokens_in_float64(random_batch, gamma, lam):
    batch = with_token_rewards(random_batch(23), 2)
    generator = torch.Generator().manual_seed(3)
    batch["tokens", "values"] = torch.randn(len(batch["tokens"]), generator=generator)
    own, values = (batch["tokens", n].double().tolist() for n in ("token_rewards", "values"))
    expected = [0.0] * len(own)
    for reward, _, places in turns(batch):
        received = [own[i] + (reward if i == places[-1] else 0.0) for i in places]
        after = [values[i] for i in places[1:]] + [0.0]
        delta = [r + gamma * v - values[i] for r, v, i in zip(received, after, places, strict=True)]
        for t, place in enumerate(places):  # the sum itself instead of its recursion
            expected[place] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
    batch = GAE(gamma, lam, whiten=False)(batch)
    ours = batch["tokens", "advantages"]
    assert ours.tolist() == pytest.approx(expected, rel=1e-5, abs=2e-6)
    mask = batch["tokens", "loss_mask"]
    torch.testing.assert_close(
        batch["tokens", "returns"], (ours + batch["tokens", "values"]) * mask, rtol=0, atol=1e-6
    )
