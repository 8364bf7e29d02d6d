"""Test SimulationLoss: what adversary and simulator learn from their logits, by hand."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from lightning_rl.envs.networks.distributions import Categorical
from lightning_rl.errors import ConfigError
from lightning_rl.games import SimulationLoss

AGENTS = ("adversarial_verifier", "simulator")


def drawn_by(*shape):
    return {
        name: {
            action: Categorical(torch.randn(*shape, n, requires_grad=True))
            for action, n in (("message", 6), ("decision", 3))
        }
        for name in AGENTS
    }


def test_each_follows_the_gradient_of_what_it_is_paid():
    torch.manual_seed(0)
    made = drawn_by(5, 1)
    loss, metrics = SimulationLoss(coef=0.5)(made)
    assert loss.shape == metrics["likeness"].shape == (5, 1)
    loss.sum().backward()
    adversary, simulator = (made[name] for name in AGENTS)
    expected = 0.0
    for action in ("message", "decision"):
        leaves = [
            m[action].logits.detach().double().requires_grad_() for m in (adversary, simulator)
        ]
        alike = cosine_similarity(*leaves, dim=-1)
        alike.sum().backward()
        for own, leaf, sign in zip((adversary, simulator), leaves, (0.5, -0.5), strict=True):
            torch.testing.assert_close(own[action].logits.grad, (sign * leaf.grad).float())
        expected = expected + alike.detach() / 2
    torch.testing.assert_close(metrics["likeness"], expected.float())


def test_what_is_no_weight_is_refused():
    with pytest.raises(ConfigError, match="coef=-1"):
        SimulationLoss(-1.0)
