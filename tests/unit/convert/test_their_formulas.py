"""Test the numbers of docs/convert/*.md against the formulas of both sides in float64.

Their formulas are written here on padded tensors (B, T) with a mask, as they have them.
"""

import pytest
import torch

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.baselines import RLOO, ReinforcePlusPlus
from lightning_rl.algos.correction import SequenceMIS, SequenceTIS
from lightning_rl.algos.kl import K2Penalty
from lightning_rl.algos.losses import CISPO, GSPO, SAPO, PPOClip, Reinforce, ValueLoss
from lightning_rl.algos.objective import SequenceMean, TokenMean, TokenSum
from lightning_rl.algos.schedules import AdaptiveCoefficient
from lightning_rl.data.batch import token_rows
from tests.support.peer_objectives import Padded

# Each token takes a handful of float64 operations on numbers of order 1.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


@pytest.fixture
def batch(random_batch):
    """Make four groups of three, in float64, with logprobs that moved by up to some nats."""
    batch = random_batch(11, groups=4, longest=12)
    generator = torch.Generator().manual_seed(1)
    live = batch["tokens", "loss_mask"]
    for name, spread in (("old_logprobs", 1.0), ("ref_logprobs", 1.0), ("values", 1.0)):
        noise = torch.randn(len(live), generator=generator, dtype=torch.double)
        batch["tokens", name] = (noise * spread - 2.0) * live
    moved = torch.randn(len(live), generator=generator, dtype=torch.double)
    batch["tokens", "logprobs"] = (batch["tokens", "old_logprobs"] + moved) * live
    batch["tokens", "rollout_logprobs"] = (batch["tokens", "old_logprobs"] - 0.1 * moved) * live
    advantages = torch.randn(len(batch["rollouts"]), generator=generator, dtype=torch.double)
    batch["tokens", "advantages"] = advantages[token_rows(batch)] * live
    batch["rollouts", "reward"] = batch["rollouts", "reward"].double()
    return batch


def our_gradient(batch, loss, aggregation) -> torch.Tensor:
    """Return the gradient of the aggregated loss by the model tokens' logprobs."""
    padded = Padded(batch)
    tokens = batch["tokens"][padded.live]
    tokens["row"] = padded.row
    logprobs = tokens["logprobs"].clone().requires_grad_()
    weights = aggregation(batch)[padded.live].double()
    per_token = loss(logprobs, tokens)
    per_token = per_token[0] if isinstance(per_token, tuple) else per_token
    return torch.autograd.grad((weights * per_token).sum(), logprobs)[0]


def their_gradient(batch, loss) -> torch.Tensor:
    """Return the gradient of ``loss(logprobs, padded)`` by the same."""
    padded = Padded(batch)
    logprobs = padded(batch["tokens", "logprobs"]).requires_grad_()
    return padded.flat(torch.autograd.grad(loss(logprobs, padded), logprobs)[0])


def ratio(batch, logprobs, padded):
    return (logprobs - padded(batch["tokens", "old_logprobs"])).exp()


def token_mean(values, padded):
    return (values * padded.mask).sum() / padded.mask.sum()


def sequence_mean(values, padded):
    return ((values * padded.mask).sum(1) / padded.mask.sum(1)).mean()


def same(ours, theirs):
    assert theirs.abs().max() > 0.01
    # Weights of ours are float32 sums of ones, exact here; what is left is float64's rounding,
    # and of one division in float32.
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-9)


def test_cispo_of_trl_bounds_the_ratio_itself(batch):
    def trl(logprobs, padded):
        weight = ratio(batch, logprobs, padded).clamp(max=5.0).detach()
        return token_mean(-weight * padded(batch["tokens", "advantages"]) * logprobs, padded)

    moved = (batch["tokens", "logprobs"] - batch["tokens", "old_logprobs"]).exp()
    assert (moved > 5).any()  # the bound is at work
    same(our_gradient(batch, CISPO(1.0, 4.0), TokenMean()), their_gradient(batch, trl))


def test_delta_of_trl_is_dual_clip(batch):
    def trl(logprobs, padded):
        w, advantages = ratio(batch, logprobs, padded), padded(batch["tokens", "advantages"])
        first, second = w.clamp(max=3.0) * advantages, w.clamp(0.8, 1.28) * advantages
        return token_mean(-torch.min(first, second), padded)

    loss = PPOClip(0.2, 0.28, dual_clip=3.0)
    same(our_gradient(batch, loss, TokenMean()), their_gradient(batch, trl))


def test_clip_ratio_c_of_verl_is_dual_clip(batch):
    def verl(logprobs, padded):
        w, advantages = ratio(batch, logprobs, padded), padded(batch["tokens", "advantages"])
        upper = torch.maximum(-advantages * w, -advantages * w.clamp(0.8, 1.2))
        bounded = torch.min(-advantages * 3.0, upper)
        return token_mean(torch.where(advantages < 0, bounded, upper), padded)

    same(our_gradient(batch, PPOClip(dual_clip=3.0), TokenMean()), their_gradient(batch, verl))


@pytest.mark.parametrize(
    ("aggregation", "theirs"), [(TokenMean(), token_mean), (SequenceMean(), sequence_mean)]
)
def test_the_sequence_level_of_trl_is_gspo(batch, aggregation, theirs):
    def trl(logprobs, padded):
        log_ratio = logprobs - padded(batch["tokens", "old_logprobs"])
        s = ((log_ratio * padded.mask).sum(1) / padded.mask.sum(1)).exp().unsqueeze(1)
        advantages = padded(batch["tokens", "advantages"])[:, :1]
        loss = -torch.min(s * advantages, s.clamp(0.8, 1.2) * advantages)
        return theirs(loss.expand(padded.shape), padded)

    # An advantage is of the rollout, so its first token has it.
    same(our_gradient(batch, GSPO(0.2, 0.2), aggregation), their_gradient(batch, trl))


def test_sapo_of_both(batch):
    def trl(logprobs, padded):
        advantages = padded(batch["tokens", "advantages"])
        tau = torch.where(advantages > 0, 1.0, 1.05)
        gate = torch.sigmoid(tau * (ratio(batch, logprobs, padded) - 1)) * 4 / tau
        return sequence_mean(-gate * advantages, padded)

    same(our_gradient(batch, SAPO(1.0, 1.05), SequenceMean()), their_gradient(batch, trl))


def test_bias_corrected_kl_of_trl_has_k2s_gradient_on_policy(batch):
    batch["tokens", "logprobs"] = batch["tokens", "old_logprobs"].clone()  # the ratio is 1

    def trl(logprobs, padded):
        d = padded(batch["tokens", "ref_logprobs"]) - logprobs
        return token_mean((d.exp() - d - 1) * ratio(batch, logprobs, padded), padded)

    def ours(logprobs, tokens):
        return K2Penalty()(logprobs, tokens["ref_logprobs"])

    same(our_gradient(batch, ours, TokenMean()), their_gradient(batch, trl))


def test_rloo_of_trl_sums_over_tokens(batch):
    batch["tokens", "logprobs"] = batch["tokens", "old_logprobs"].clone()
    rewards = batch["rollouts", "reward"].view(4, 3)
    baseline = (rewards.sum(1, keepdim=True) - rewards) / 2

    def trl(logprobs, padded):
        log_ratio = logprobs - padded(batch["tokens", "old_logprobs"])
        s = (log_ratio * padded.mask).sum(1).exp()
        advantages = (rewards - baseline).reshape(-1)
        return -torch.min(s * advantages, s.clamp(0.8, 1.2) * advantages).mean()

    theirs = their_gradient(batch, trl)
    same(our_gradient(RLOO()(batch), Reinforce(), TokenSum(max_tokens=1)), theirs)


def test_advantages_divide_by_std_plus_eps(batch):
    rewards = batch["rollouts", "reward"].view(4, 3)
    for eps in (1e-4, 1e-6):  # TRL's and verl's
        theirs = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
        ours = GRPO(eps=eps)(batch)["tokens", "advantages"]
        padded = Padded(batch)
        torch.testing.assert_close(padded(ours)[:, 0], theirs.reshape(-1), **TOLERANCE)


def test_the_critic_of_verl_has_coef_one(batch):
    batch["tokens", "returns"] = batch["tokens", "ref_logprobs"].clone()  # any numbers

    def verl(values, padded):
        old, returns = padded(batch["tokens", "values"]), padded(batch["tokens", "returns"])
        clipped = values.clamp(old - 0.5, old + 0.5)
        error = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        return 0.5 * token_mean(error, padded)

    loss = ValueLoss(coef=1.0, clip=0.5)
    same(our_gradient(batch, loss, TokenMean()), their_gradient(batch, verl))


def whitened(values):
    """Whiten as verl's masked_whiten does, by an unbiased variance."""
    return (values - values.mean()) * (values.var() + 1e-8).rsqrt()


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_whitening_has_verls_floor(batch, scale):
    batch["rollouts", "reward"] = batch["rollouts", "reward"] * scale
    padded = Padded(batch)
    rewards = batch["rollouts", "reward"][padded.row]
    ours = ReinforcePlusPlus(unbiased=True)(batch)["tokens", "advantages"][padded.live]
    # Statistics over ranks are float32.
    torch.testing.assert_close(ours.double(), whitened(rewards), rtol=1e-4, atol=1e-5)


def test_gae_of_verl(batch):
    padded = Padded(batch)
    values, rewards = padded(batch["tokens", "values"]), torch.zeros(padded.shape).double()
    last = padded.mask.sum(1).long() - 1
    rewards[torch.arange(len(last)), last] = batch["rollouts", "reward"]
    following, carry, found = torch.zeros(len(last)), torch.zeros(len(last)), []
    for t in reversed(range(padded.shape[1])):
        mask = padded.mask[:, t]
        now = rewards[:, t] + 0.9 * following - values[:, t] + 0.9 * 0.8 * carry
        following = values[:, t] * mask + (1 - mask) * following
        carry = now * mask + (1 - mask) * carry
        found.append(carry)
    theirs = whitened(padded.flat(torch.stack(found[::-1], 1)))
    ours = GAE(gamma=0.9, lam=0.8, unbiased=True)(batch)["tokens", "advantages"][padded.live]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sequence_corrections_are_products(batch):
    padded = Padded(batch)
    tokens = batch["tokens"][padded.live]
    tokens["row"] = padded.row
    gap = batch["tokens", "old_logprobs"] - batch["tokens", "rollout_logprobs"]
    product = (padded(gap) * padded.mask).sum(1).exp()[padded.row]
    assert (product > 1.2).any()
    assert (product < 0.9).any()
    torch.testing.assert_close(SequenceTIS(cap=1.2)(tokens)[0], product.clamp(max=1.2))
    kept = torch.where((product >= 0.9) & (product <= 1.2), product, 0.0)
    torch.testing.assert_close(SequenceMIS(low=0.9, high=1.2)(tokens)[0], kept)


def test_the_adaptive_coefficient_of_verl():
    coefficient = AdaptiveCoefficient(value=0.001, target=0.1, gain=512 / 10000)
    coefficient.update(0.3)
    assert coefficient.value == pytest.approx(0.001 * (1 + 0.2 * 512 / 10000), rel=1e-15)
