"""Group-relative advantages: by hand, and in float64 against what their papers derive them from."""

import math
from itertools import combinations, product
from statistics import fmean

import pytest
import torch

from lightning_rl.algos.advantages import GRPO
from lightning_rl.algos.baselines import OPMD, RLOO, DrGRPO, MaxRL, PassAtK
from lightning_rl.algos.kl import K1Penalty
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule

ALL = [GRPO(), GRPO(False), DrGRPO(), RLOO(), MaxRL(), PassAtK(k=2), OPMD(tau=0.5)]


def advantages(advantage, make_rollout, rewards, groups=None) -> list[float]:
    """Return one number per rollout, each of a prompt token and one model token."""
    groups = groups or "a" * len(rewards)
    pairs = zip(rewards, groups, strict=True)
    batch = pack_rollouts([make_rollout([3], [1], reward=r, group_id=g) for r, g in pairs])
    tokens = advantage(batch)["tokens", "advantages"].reshape(-1, 2)
    assert not tokens[:, 0].any()
    return tokens[:, 1].tolist()


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (DrGRPO(), [0.75, -0.25, -0.25, -0.25]),
        # The others' means: 0 for the success, 1/3 for the rest.
        (RLOO(), pytest.approx([1, *[-1 / 3] * 3])),
        (MaxRL(), [3, -1, -1, -1]),  # mean 0.25: (1 - 0.25) / 0.25 = 3
        # 3 of 4 wrong: mean 1 - 3/6 = 0.5, std 0.5; right 0.5/0.5, wrong (0.5 - 2/3)/0.5
        (PassAtK(k=2), pytest.approx([1, *[-1 / 3] * 3])),
        # GRPO with the biased deviation: mean 0.25, std sqrt(3)/4
        (PassAtK(k=1), pytest.approx([3**0.5, *[-(3**-0.5)] * 3])),
    ],
)
def test_one_success_of_four(make_rollout, advantage, expected):
    assert advantages(advantage, make_rollout, [1, 0, 0, 0]) == expected


def test_opmd(make_rollout):
    # mean of exp(r) = (2 + 1) / 2, so A = (ln 2 - ln 1.5) / 2 and -ln 1.5 / 2
    expected = [math.log(4 / 3) / 2, -math.log(1.5) / 2]
    assert advantages(OPMD(tau=1.0), make_rollout, [math.log(2), 0.0]) == pytest.approx(expected)


def test_opmd_with_a_small_tau_compares_with_the_best_and_does_not_overflow(make_rollout):
    # exp(1000 / 0.01) would overflow; the soft maximum is max - tau ln 2 here
    values = advantages(OPMD(tau=0.01), make_rollout, [1000.0, 0.0])
    soft = 1000 - 0.01 * math.log(2)
    assert values == pytest.approx([(1000 - soft) / 1.01, -soft / 1.01], rel=1e-5)


def test_opmd_with_a_large_tau_compares_with_the_mean(make_rollout):
    values = advantages(OPMD(tau=1000.0), make_rollout, [1.0, 0.0])
    # (r - mean) / 1001, up to O(1/tau) and the rounding of tau x log of nearly 1
    assert values == pytest.approx([0.5 / 1001, -0.5 / 1001], rel=5e-3)


@pytest.mark.parametrize("advantage", [DrGRPO(), RLOO(), MaxRL(), PassAtK(k=2), OPMD()])
@pytest.mark.parametrize("rewards", [[1, 1, 1], [0, 0, 0]])
def test_a_group_without_spread_gets_nothing(make_rollout, advantage, rewards):
    assert advantages(advantage, make_rollout, rewards) == pytest.approx([0, 0, 0], abs=1e-7)


@pytest.mark.parametrize("advantage", [DrGRPO(), RLOO(), MaxRL(), PassAtK(k=1), OPMD()])
def test_a_group_of_one_gets_nothing(make_rollout, advantage):
    assert advantages(advantage, make_rollout, [0.7]) == pytest.approx([0], abs=1e-7)


# ---------------------------------------------------------------- float64 parity


def reference_grpo(rewards, std=True):
    mean = fmean(rewards)
    spread = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (spread + 1e-6 if std else 1) for r in rewards]


def reference_rloo(rewards):
    others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    return [r - fmean(rest) for r, rest in zip(rewards, others, strict=True)]


def reference_maxrl(rewards):
    """Return N (r / sum of rewards - 1 / N): the log likelihood's estimator, less its variate."""
    n, total = len(rewards), sum(rewards)
    return [n * (r / total - 1 / n) for r in rewards] if total else [0.0] * n


def reference_pass_at_k(rewards, k):
    """Take all sets of k: a set's reward is its best, standardised and averaged by member."""
    sets = list(combinations(range(len(rewards)), k))
    best = [max(float(rewards[i] >= 1) for i in members) for members in sets]
    mean = fmean(best)
    std = fmean((b - mean) ** 2 for b in best) ** 0.5
    if std == 0:
        return [0.0] * len(rewards)
    return [
        fmean((b - mean) / std for b, members in zip(best, sets, strict=True) if i in members)
        for i in range(len(rewards))
    ]


def reference_opmd(rewards, tau):
    """Compute tau log Z by logsumexp; dividing by 1 + tau is the regularised step's length."""
    z = torch.tensor(rewards, dtype=torch.double) / tau
    baseline = tau * (float(z.logsumexp(0)) - math.log(len(rewards)))
    return [(r - baseline) / (1 + tau) for r in rewards]


REFERENCES = [
    (GRPO(), reference_grpo),
    (DrGRPO(), lambda r: reference_grpo(r, std=False)),
    (RLOO(), reference_rloo),
    (MaxRL(), reference_maxrl),
    (PassAtK(k=1), lambda r: reference_pass_at_k(r, 1)),
    (PassAtK(k=2), lambda r: reference_pass_at_k(r, 2)),
    (PassAtK(k=3), lambda r: reference_pass_at_k(r, 3)),
    (OPMD(tau=0.3), lambda r: reference_opmd(r, 0.3)),
    (OPMD(tau=2.0), lambda r: reference_opmd(r, 2.0)),
]


@pytest.mark.parametrize(("advantage", "reference"), REFERENCES)
def test_parity_in_float64(make_rollout, advantage, reference):
    generator = torch.Generator().manual_seed(0)
    for seed in range(10):
        sizes = [3, 5, 8, 4]
        # Quarters are exact in float32; 1 is a success.
        rewards = (torch.randint(0, 5, (sum(sizes),), generator=generator) / 4).tolist()
        groups = [name for name, size in zip("abcd", sizes, strict=True) for _ in range(size)]
        expected = [a for part in torch.tensor(rewards, dtype=torch.double).split(sizes)
                    for a in reference(part.tolist())]  # fmt: skip
        ours = advantages(advantage, make_rollout, rewards, groups)
        assert ours == pytest.approx(expected, rel=2e-6, abs=2e-6), seed


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_maxrl_estimates_the_gradient_of_the_truncated_log_likelihood(n, p):
    """MaxRL takes n - 1 terms of log p = -sum (1 - p)^k / k, over all outcomes of n draws."""
    expected = sum((1 - p) ** (k - 1) for k in range(1, n))  # d/dp of these terms
    score = {1.0: 1 / p, 0.0: -1 / (1 - p)}  # d log P(outcome) / dp
    mean = 0.0
    for outcome in product([0.0, 1.0], repeat=n):
        rewards = torch.tensor(outcome)
        values = MaxRL().compare(rewards, torch.zeros(n, dtype=torch.long)).tolist()
        probability = math.prod(p if r else 1 - p for r in outcome)
        pairs = zip(values, outcome, strict=True)
        mean += probability * sum(a * score[r] for a, r in pairs) / n
    assert mean == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- structure


@pytest.mark.parametrize("advantage", ALL)
def test_the_order_of_rollouts_does_not_matter(random_rollouts, advantage):
    rollouts = random_rollouts(3, groups=4, group_size=5)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(2)).tolist()

    def per_rollout(arranged):
        batch = advantage(pack_rollouts(arranged))
        parts = batch["tokens", "advantages"].split(batch["rollouts", "length"].tolist())
        return {r.id: part for r, part in zip(arranged, parts, strict=True)}

    straight, shuffled = per_rollout(rollouts), per_rollout([rollouts[i] for i in order])
    for name, part in straight.items():
        torch.testing.assert_close(shuffled[name], part, rtol=0, atol=1e-6)


@pytest.mark.parametrize("advantage", ALL)
def test_only_model_tokens_get_credit(make_rollout, advantage):
    # A turn of the model, the environment's reply, and another turn.
    mask = [True, True, False, False, True]
    rollouts = [
        make_rollout([3, 4], [5, 6, 7, 8, 1], reward=1.0, loss_mask=mask),
        make_rollout([3, 4], [5, 1], reward=0.0),
        make_rollout([3, 4], [6, 1], reward=0.0),
    ]
    tokens = advantage(pack_rollouts(rollouts))["tokens", "advantages"]
    first = tokens[:7].tolist()
    assert [a != 0 for a in first] == [False, False, *mask]
    assert len({a for a in first if a}) == 1  # the same credit for each of them


@pytest.mark.parametrize("advantage", [DrGRPO(), RLOO(), MaxRL(), OPMD()])
def test_rewards_of_tokens_count_as_the_rollouts(make_rollout, advantage):
    def batch(rewards, token_rewards):
        rollouts = [make_rollout([3], [4, 1], reward=r) for r in rewards]
        packed = pack_rollouts(rollouts)
        packed["tokens", "token_rewards"] = torch.tensor(token_rewards)
        return advantage(packed)["tokens", "advantages"].tolist()

    split = batch([1.0, 0.0], [0, -0.25, -0.25, 0, 0.5, 0.25])
    assert split == pytest.approx(batch([0.5, 0.75], [0.0] * 6))


def test_groups_too_small_for_k_and_impossible_parameters_are_refused(make_rollout):
    assert PassAtK(k=3).min_group_size == 3
    # A failed rollout may leave fewer than k: there is no set to judge.
    assert advantages(PassAtK(k=3), make_rollout, [1, 0]) == [0, 0]
    with pytest.raises(ConfigError, match=r"PassAtK\(k=0\) must be >= 1"):
        PassAtK(k=0)
    with pytest.raises(ConfigError, match=r"OPMD\(tau=0.0\) must be > 0"):
        OPMD(tau=0.0)


@pytest.mark.parametrize("advantage", [PassAtK(), MaxRL()])
def test_what_reads_the_reward_as_graded_takes_no_kl_off_it(tiny_model, advantage):
    """Success is 1, and 1 minus a KL is none: advantages were all 0, or divided by nearly 0."""
    with pytest.raises(ConfigError, match=f"advantage={type(advantage).__name__} needs the reward"):
        PolicyModule(str(tiny_model), advantage=advantage, kl_reward=K1Penalty(0.1))
    module = PolicyModule(str(tiny_model), advantage=advantage, kl=K1Penalty(0.1))
    assert module.objective.kl is not None
    assert PolicyModule(str(tiny_model), advantage=RLOO(), kl_reward=K1Penalty(0.1))
