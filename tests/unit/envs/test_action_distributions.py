"""Test our distributions of actions against torch's."""

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Bernoulli as TorchBernoulli,
    Categorical as TorchCategorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from lightning_rl.envs.networks.distributions import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
)

LOW, HIGH = torch.tensor([-2.0, 0.0]).double(), torch.tensor([2.0, 1.0]).double()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def made(kind, seed):
    """Return a distribution of ours over 5 places, and torch's."""
    if kind == "categorical":
        logits = drawn(5, 4, seed=seed)
        return Categorical(logits), TorchCategorical(logits=logits)
    if kind == "bernoulli":
        logits = drawn(5, 3, seed=seed)
        return Bernoulli(logits), Independent(TorchBernoulli(logits=logits), 1)
    mean, log_std = drawn(5, 2, seed=seed), drawn(5, 2, seed=seed + 100) / 2
    base = Independent(Normal(mean, log_std.exp()), 1)
    if kind == "gaussian":
        return Gaussian(mean, log_std), base
    squash = [TanhTransform(), AffineTransform((LOW + HIGH) / 2, (HIGH - LOW) / 2, event_dim=1)]
    return TanhGaussian(mean, log_std, LOW, HIGH), TransformedDistribution(base, squash)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "tanh"])
def test_they_are_torchs(kind):
    ours, theirs = made(kind, 0)
    torch.manual_seed(0)
    action = ours.sample()
    known = action.double() if kind != "categorical" else action
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(known), atol=1e-6, rtol=1e-6)
    if kind != "tanh":
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
        other, others = made(kind, 1)
        torch.testing.assert_close(ours.kl(other), kl_divergence(theirs, others))
    assert (ours.kl(ours) == 0).all()


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "tanh"])
def test_samples_have_the_probabilities_that_are_said(kind):
    ours, _ = made(kind, 2)
    one = ours.at(torch.zeros(20_000, dtype=torch.long))
    torch.manual_seed(0)
    action = one.sample()
    # The mean of -log p over samples is the entropy, whatever the distribution.
    surprise = -one.log_prob(action)
    error = surprise.std() / len(surprise) ** 0.5
    reference = one.entropy() if kind != "tanh" else -one.log_prob(one.sample())
    assert abs(surprise.mean() - reference.mean()) < 6 * error
    assert one.mode().shape == action.shape


def test_a_masked_action_is_never_taken_and_breaks_no_number():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    choice = Categorical(logits)
    assert 1 not in Categorical(logits.expand(500, 3)).sample()
    assert choice.entropy().isfinite().all()
    assert choice.kl(choice).isfinite().all()
    (choice.entropy() + choice.log_prob(torch.tensor([0]))).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_one_hot_actions_are_the_same_choices():
    logits = drawn(5, 4)
    torch.manual_seed(3)
    index = Categorical(logits).sample()
    torch.manual_seed(3)
    row = Categorical(logits, one_hot=True).sample()
    assert (row.argmax(-1) == index).all()
    assert (row.sum(-1) == 1).all()
    torch.testing.assert_close(
        Categorical(logits, one_hot=True).log_prob(row), Categorical(logits).log_prob(index)
    )


def test_several_choices_are_independent():
    logits = drawn(5, 7)
    both = MultiCategorical(logits, (3, 4))
    first, second = Categorical(logits[:, :3]), Categorical(logits[:, 3:])
    action = both.sample()
    assert action.shape == (5, 2)
    expected = first.log_prob(action[:, 0]) + second.log_prob(action[:, 1])
    torch.testing.assert_close(both.log_prob(action), expected)
    torch.testing.assert_close(both.entropy(), first.entropy() + second.entropy())


def test_squashed_actions_stay_within_bounds():
    ours, _ = made("tanh", 0)
    far = TanhGaussian(ours.mean * 50, ours.log_std, LOW, HIGH)
    for action in (far.sample(), far.mode(), far.rsample_and_log_prob()[0]):
        assert ((action >= LOW) & (action <= HIGH)).all()
    assert far.log_prob(far.sample()).isfinite().all()
    action, logprob = ours.rsample_and_log_prob()
    torch.testing.assert_close(ours.log_prob(action), logprob, atol=1e-5, rtol=1e-5)
