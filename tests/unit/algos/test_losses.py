"""Test policy loss, value loss and KL penalty, by hand."""

import math

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.algos.kl import K3Penalty, k3
from lightning_rl.algos.losses import PPOClip, ValueLoss
from lightning_rl.errors import ConfigError


def ppo(ratios: list[float], advantages: list[float], **bounds: float):
    """Return loss, gradient by logprob, and metrics, for given ratios to the old policy."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    tokens = TensorDict(
        {"old_logprobs": torch.zeros(len(ratios)), "advantages": torch.tensor(advantages)},
        batch_size=[len(ratios)],
    )
    loss, metrics = PPOClip(**bounds)(logprobs, tokens)
    loss.sum().backward()
    return loss.tolist(), logprobs.grad.tolist(), metrics


def test_ppo_clip_in_all_cases():
    loss, gradient, metrics = ppo(
        # inside | good and already likelier | bad and already rarer | the two that still pull back
        [1.1, 1.5, 0.5, 0.5, 1.5],
        [2.0, 2.0, -2.0, 2.0, -2.0],
    )
    # -1.1*2 | -1.2*2 (clipped) | 0.8*2 (clipped) | -0.5*2 | 1.5*2
    assert loss == pytest.approx([-2.2, -2.4, 1.6, -1.0, 3.0])
    # d(-wA)/dlogp = -wA where it is not clipped
    assert gradient == pytest.approx([-2.2, 0.0, 0.0, -1.0, 3.0])
    assert metrics["clip_frac"].tolist() == [0, 1, 1, 0, 0]


def test_ppo_clip_bounds_are_separate():
    loss, gradient, _ = ppo([1.25, 1.35, 0.85], [1.0, 1.0, -1.0], clip_low=0.1, clip_high=0.3)
    assert loss == pytest.approx([-1.25, -1.3, 0.9])
    assert gradient == pytest.approx([-1.25, 0.0, 0.0])


def test_ppo_on_policy_is_the_policy_gradient():
    loss, gradient, metrics = ppo([1.0, 1.0], [0.5, -3.0])
    assert loss == [-0.5, 3.0]
    assert gradient == [-0.5, 3.0]
    assert not metrics["clip_frac"].any()


def test_kl_to_the_old_policy_is_a_nonnegative_estimate():
    metrics = ppo([2.0, 0.5, 1.0], [1.0, 1.0, 1.0])[2]
    # w - 1 - ln w
    expected = [1 - math.log(2), -0.5 + math.log(2), 0.0]
    assert metrics["kl_old"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "bounds", [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"clip_low": -0.2}]
)
def test_impossible_clip_bounds_are_refused(bounds):
    with pytest.raises(ConfigError, match="0 < clip_low < 1"):
        PPOClip(**bounds)


def value_loss(clip: float | None) -> tuple[list[float], list[float]]:
    values = torch.tensor([1.0, 1.0, 0.1]).requires_grad_()
    tokens = TensorDict(
        {"values": torch.zeros(3), "returns": torch.tensor([2.0, 0.0, 1.0])}, batch_size=[3]
    )
    loss, _ = ValueLoss(coef=0.5, clip=clip)(values, tokens)
    loss.sum().backward()
    return loss.tolist(), values.grad.tolist()


def test_value_loss():
    loss, gradient = value_loss(None)
    # 0.5 * 0.5 * error^2 with errors -1, 1 and -0.9; gradient 0.5 * error
    assert loss == pytest.approx([0.25, 0.25, 0.2025])
    assert gradient == pytest.approx([-0.5, 0.5, -0.45])


def test_clipped_value_loss_takes_the_larger_error():
    loss, gradient = value_loss(0.2)
    # clipped to 0.2: errors -1.8 (larger: clipped, no gradient) and 0.2 (smaller: the plain one)
    assert loss == pytest.approx([0.25 * 1.8**2, 0.25, 0.2025])
    assert gradient == pytest.approx([0.0, 0.5, -0.45])


def test_k3_is_never_negative_also_for_tiny_differences():
    reference = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 20
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for scale in (1e-4, 1e-2, 1.0, 3.0):
        # At 1e-4 exp(d) - d - 1 would be rounding noise of either sign; expm1 keeps it positive.
        estimate = k3(reference + scale * noise, reference)
        assert (estimate >= 0).all(), scale


def test_gradient_of_k3_pulls_towards_the_reference():
    logprobs = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    K3Penalty()(logprobs, torch.full((3,), -2.0)).sum().backward()
    # 1 - exp(ref - logp)
    assert logprobs.grad.tolist() == pytest.approx([1 - 1 / math.e, 1 - math.e, 0.0])


def test_a_kl_coefficient_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"coef=0.*kl: null"):
        K3Penalty(coef=0.0)
