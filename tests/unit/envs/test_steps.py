"""Test advantages of steps: by hand, against torchrl's GAE, and where episodes end."""

import pytest
import torch
from torchrl.objectives.value.functional import generalized_advantage_estimate

from lightning_rl.envs import StepGAE, StepReturn, Steps
from lightning_rl.envs.algos.steps import reward_to_go, step_gae
from lightning_rl.errors import ConfigError

GAMMA, LAM = 0.96875, 0.875  # torchrl rounds them to float32, and these are exact there


def steps(rewards, values, following, terminated=(), done=(), dtype=torch.float64):
    rewards, values, following = (
        torch.tensor([x], dtype=dtype) for x in (rewards, values, following)
    )
    flags = torch.zeros(2, 1, rewards.shape[1], dtype=torch.bool)
    for place in terminated:
        flags[:, 0, place] = True
    for place in done:
        flags[1, 0, place] = True
    return Steps(rewards, values, following, flags[0], flags[1])


def test_gae_by_hand():
    # delta_1 = 2 + 0.5 x 4 - 3 = 1, delta_0 = 1 + 0.5 x 3 - 2 = 0.5; A_0 = 0.5 + 0.25 x 1
    made = steps([1.0, 2.0], [2.0, 3.0], [3.0, 4.0])
    advantages, returns = step_gae(made, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.75, 1.0]]
    assert returns.tolist() == [[2.75, 4.0]]


def test_nothing_follows_the_end_but_a_cut_is_worth_its_value():
    ended, _ = step_gae(steps([1.0, 1.0], [0.0, 0.0], [9.0, 9.0], terminated=[0]), 0.5, 1.0)
    assert ended[0, 0] == 1.0
    cut, _ = step_gae(steps([1.0, 1.0], [0.0, 0.0], [9.0, 9.0], done=[0]), 0.5, 1.0)
    assert cut[0, 0] == 1 + 0.5 * 9  # and nothing of the next episode
    assert cut[0, 1] == ended[0, 1] == 1 + 0.5 * 9


def test_rewards_to_go_by_hand():
    made = steps([1.0, 2.0, 4.0], [0.0] * 3, [9.0, 9.0, 8.0], terminated=[1])
    assert reward_to_go(made, 0.5).tolist() == [[2.0, 2.0, 8.0]]
    cut = steps([1.0, 2.0, 4.0], [0.0] * 3, [9.0, 9.0, 8.0], done=[0])
    assert reward_to_go(cut, 0.5).tolist() == [[5.5, 6.0, 8.0]]


def test_a_baseline_is_the_critics_value():
    made = steps([1.0, 2.0], [0.5, 0.25], [9.0, 0.0], terminated=[1])
    advantages, targets = StepReturn(gamma=1.0)(made)
    assert targets.tolist() == [[3.0, 2.0]]
    assert advantages.tolist() == [[2.5, 1.75]]
    assert StepReturn(gamma=1.0, baseline=False)(made)[0].tolist() == [[3.0, 2.0]]
    assert not StepReturn(baseline=False).needs_values


@pytest.mark.parametrize("agents", [(), (3,)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_torchrls(seed, agents):
    draw = torch.Generator().manual_seed(seed)
    rewards, values, following = torch.randn(3, 4, 20, *agents, generator=draw).double()
    terminated = torch.rand(4, 20, generator=draw) < 0.1
    done = terminated | (torch.rand(4, 20, generator=draw) < 0.1)
    ours, returns = step_gae(Steps(rewards, values, following, terminated, done), GAMMA, LAM)
    for agent in range(3 if agents else 1):
        own = [x[..., agent] if agents else x for x in (values, following, rewards, ours, returns)]
        value, after, reward, advantage, target = (x.unsqueeze(-1) for x in own)
        flags = done.unsqueeze(-1), terminated.unsqueeze(-1)
        theirs = generalized_advantage_estimate(GAMMA, LAM, value, after, reward, *flags)
        torch.testing.assert_close(advantage, theirs[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(target, theirs[1], rtol=0, atol=1e-12)


def test_reward_to_go_is_gae_with_lambda_one():
    draw = torch.Generator().manual_seed(0)
    rewards, values, following = torch.randn(3, 4, 20, generator=draw).double()
    following[:, :-1] = values[:, 1:]  # as nothing is cut but at the end
    terminated = torch.rand(4, 20, generator=draw) < 0.1
    made = Steps(rewards, values, following, terminated, terminated)
    torch.testing.assert_close(reward_to_go(made, 0.9), step_gae(made, 0.9, 1.0)[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StepGAE(gamma=1.5), r"StepGAE\(gamma=1.5\) must be in \[0, 1\]"),
        (lambda: StepGAE(lam=-1), r"StepGAE\(lam=-1\) must be in \[0, 1\]"),
        (lambda: StepReturn(gamma=-0.1), r"StepReturn\(gamma=-0.1\) must be in"),
    ],
)
def test_impossible_discounts_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
