"""KL to a reference: estimators against the exact KL, in the loss, in the reward, coefficients."""

import math

import pytest
import torch

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.baselines import ReinforcePlusPlus
from lightning_rl.algos.kl import (
    K1Penalty,
    K2Penalty,
    K3Penalty,
    k1,
    k2,
    k3,
)
from lightning_rl.algos.schedules import AdaptiveCoefficient
from lightning_rl.errors import ConfigError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.reference import PeriodicReference
from lightning_rl.module import PolicyModule
from tests.support.tolerances import gradient_rounding


def test_estimators_by_hand():
    logprobs, reference = torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-2.0, -1.0, -1.5])
    assert k1(logprobs, reference).tolist() == [1, -1, 0]
    assert k2(logprobs, reference).tolist() == [0.5, 0.5, 0]
    # exp(d) - d - 1 with d = -1, 1, 0
    assert k3(logprobs, reference).tolist() == pytest.approx([1 / math.e, math.e - 2, 0])


# ---------------------------------------------------------------- on a small categorical


def distributions():
    generator = torch.Generator().manual_seed(5)
    logits, other = torch.randn(2, 5, generator=generator, dtype=torch.double)
    return logits.requires_grad_(), other.log_softmax(-1)


def expected_gradient(estimator):
    """Return E over samples of the estimator's gradient, in a loss: sampling is no part of it."""
    logits, reference = distributions()
    log_p = logits.log_softmax(-1)
    mean = (log_p.detach().exp() * estimator(log_p, reference)).sum()
    return torch.autograd.grad(mean, logits)[0]


def exact(reverse: bool):
    logits, log_q = distributions()
    log_p = logits.log_softmax(-1)
    of, to = (log_q, log_p) if reverse else (log_p, log_q)
    kl = (of.exp() * (of - to)).sum()
    return kl, torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    logits, reference = distributions()
    log_p = logits.log_softmax(-1)
    mean = (log_p.exp() * estimator(log_p, reference)).sum()
    torch.testing.assert_close(mean, exact(reverse=False)[0], rtol=0, atol=1e-12)


def test_gradients_in_expectation():
    # k2's is the KL's; k1's is none at all; k3's is that of the reverse KL.
    torch.testing.assert_close(expected_gradient(k2), exact(False)[1], rtol=0, atol=1e-12)
    assert float(expected_gradient(k1).abs().max()) < 1e-12
    torch.testing.assert_close(expected_gradient(k3), exact(True)[1], rtol=0, atol=1e-12)
    assert float((exact(False)[1] - exact(True)[1]).abs().max()) > 0.01  # they do differ


# ---------------------------------------------------------------- coefficients


def test_the_adaptive_coefficient_by_hand():
    coefficient = AdaptiveCoefficient(value=0.1, target=0.02, gain=0.5)
    values = []
    for measured in (0.03, 0.019, 0.0, 0.02):
        coefficient.update(measured)
        values.append(coefficient.value)
    # errors 0.5 -> 0.2, -0.05, -1 -> -0.2, 0
    assert values == pytest.approx([0.11, 0.11 * 0.975, 0.11 * 0.975 * 0.9, 0.11 * 0.975 * 0.9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": 0.0}, r"AdaptiveCoefficient\(value=0.0, target=0.01\): both must be > 0"),
        ({"target": 0.0}, r"target=0.0\): both must be > 0"),
        ({"gain": -1.0}, r"gain=-1.0\) must be > 0"),
    ],
)
def test_impossible_coefficients_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AdaptiveCoefficient(**options)


def test_a_fixed_coefficient_stays():
    penalty = K2Penalty(0.3)
    penalty.coef.update(100.0)
    assert penalty.coef.at(7) == 0.3


def test_adaptive_coefficients_follow_each_iteration_and_survive_a_checkpoint(
    tiny_model, random_batch, train_on, tmp_path
):
    def module():
        return PolicyModule(
            str(tiny_model),
            kl=K2Penalty(AdaptiveCoefficient(value=0.1, target=1e-9, gain=0.5)),
            kl_reward=K1Penalty(AdaptiveCoefficient(value=0.2, target=1e9, gain=1.0)),
            reference=PeriodicReference(2),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )

    first = module()
    trainer = train_on(first, [random_batch(1), random_batch(2)])
    # In the loss: 0 at first (-0.2), then far above the target (0.2). In the reward: far below.
    assert first.objective.kl.coef.at(0) == pytest.approx(0.1 * 0.9 * 1.1)
    assert first.kl_reward.coef.at(0) == pytest.approx(0.2 * 0.8 * 0.8)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = module()
    train_on(resumed, [random_batch(3)], tmp_path / "two.ckpt", max_epochs=2)
    # The reference was renewed after the second iteration: a KL of 0 again.
    assert resumed.objective.kl.coef.at(0) == pytest.approx(0.1 * 0.9 * 1.1 * 0.9)
    assert resumed.kl_reward.coef.at(0) == pytest.approx(0.2 * 0.8**3)
    metrics = resumed.trainer.callback_metrics
    assert float(metrics["policy/kl_ref_coef"]) == pytest.approx(0.1 * 0.9 * 1.1)
    assert float(metrics["reward/kl_coef"]) == pytest.approx(0.2 * 0.8**2)


# ---------------------------------------------------------------- in the loss


@pytest.mark.parametrize("penalty", [K1Penalty, K2Penalty, K3Penalty])
def test_the_gradient_in_the_loss(tiny_model, train_on, random_batch, penalty):
    """The gradient without advantages is coef x the mean gradient of the estimator."""
    module = PolicyModule(
        str(tiny_model), kl=penalty(0.25),
        update={"max_grad_norm": None, "max_tokens_per_micro_batch": 25},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    )  # fmt: skip
    module.configure_model()
    batch = random_batch(42)
    batch["rollouts", "reward"] = torch.zeros(12)
    with torch.no_grad():  # a reference elsewhere, or nothing would pull
        for parameter in module.reference.parameters():
            parameter.mul_(1.1)
    with torch.no_grad():
        reference = module.reference.policy(batch).logprobs
    scores = module.policy(batch)
    d = reference - scores.logprobs
    expected = {K1Penalty: -d, K2Penalty: d**2 / 2, K3Penalty: d.exp() - d - 1}[penalty].mean()
    parameters = list(module.policy.lm.parameters())
    gradients = torch.autograd.grad(0.25 * expected, parameters)
    train_on(module, [batch])
    gap = sum(float((p.grad - g).norm() ** 2) for p, g in zip(parameters, gradients, strict=True))
    size = sum(float(g.norm() ** 2) for g in gradients)
    assert (gap / size) ** 0.5 < gradient_rounding(tiny_model, len(batch["tokens"]))
    measured = float(module.trainer.callback_metrics["policy/kl_ref"])
    assert measured == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------- in the reward


def scored(module, batch):
    module.configure_model()
    with torch.no_grad():
        for parameter in module.reference.parameters():
            parameter.mul_(1.1)
    batch = module.learner.compute_ref_logprobs(module.learner.compute_old_logprobs(batch))
    return module.learner.compute_advantages(batch)


@pytest.mark.parametrize("penalty", [K1Penalty, K3Penalty])
def test_the_kl_in_the_reward_is_a_reward_of_each_model_token(tiny_model, random_batch, penalty):
    module = PolicyModule(str(tiny_model), advantage=GRPO(False), kl_reward=penalty(0.5))
    batch = scored(module, random_batch(43))
    tokens, mask = batch["tokens"], batch["tokens", "loss_mask"]
    d = (tokens["ref_logprobs"] - tokens["old_logprobs"]).double()
    kl = -d if penalty is K1Penalty else d.exp() - d - 1
    expected = torch.where(mask, -0.5 * kl, 0.0)
    torch.testing.assert_close(tokens["token_rewards"].double(), expected, rtol=1e-5, atol=1e-6)
    assert tokens["token_rewards"][mask].abs().min() > 0
    # GRPO sums it up per rollout, so its group mean is that of reward less KL.
    row = torch.repeat_interleave(torch.arange(12), batch["rollouts", "length"])
    total = batch["rollouts", "reward"].double().index_add(0, row, expected)
    for r in range(12):
        peers = total[batch["rollouts", "group"] == batch["rollouts", "group"][r]]
        ours = tokens["advantages"][(row == r) & mask]
        torch.testing.assert_close(
            ours.double(), (total[r] - peers.mean()).expand(len(ours)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("advantage", [GAE(whiten=False), ReinforcePlusPlus(), GRPO()])
def test_training_with_the_kl_in_the_reward_reports_it(
    tiny_model, train_on, random_batch, advantage
):
    module = PolicyModule(
        str(tiny_model), advantage=advantage, kl_reward=K1Penalty(0.5),
        critic=SharedValueHead() if isinstance(advantage, GAE) else None,
        update={"minibatches": 2, "max_tokens_per_micro_batch": 30},
    )  # fmt: skip
    batch = scored(module, random_batch(44))
    tokens, mask = batch["tokens"], batch["tokens", "loss_mask"]
    expected = float((tokens["old_logprobs"] - tokens["ref_logprobs"])[mask].mean())
    train_on(module, [random_batch(44)])
    assert float(module.trainer.callback_metrics["reward/kl"]) == pytest.approx(expected, rel=1e-4)
