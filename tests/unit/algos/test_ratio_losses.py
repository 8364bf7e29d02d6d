"""Test policy losses: value and gradient, by hand and in float64 against their papers' formulas."""

import math

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.algos.losses import CISPO, GSPO, SAPO, PPOClip, Reinforce
from lightning_rl.algos.trust_regions import DPPO, GMPO, TOPR, VESPO, OffPolicyMask
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from tests.support.losses import public_losses
from tests.support.tolerances import distance, gradient_rounding

# Below, at and above every bound used here, with advantages of either sign and none.
CASES = [(w, a) for w in (0.3, 0.79, 0.9, 1.0, 1.1, 1.21, 2.5, 5.0) for a in (2.0, -1.5, 0.0)]


def evaluate(loss, ratios, advantages, row=None, old=-1.3, engine=-1.3):
    """Return loss and its gradient by logprob per token, in float64, and the metrics."""
    count = len(ratios)
    old_logprobs = torch.full((count,), old, dtype=torch.double)
    logprobs = (old_logprobs + torch.tensor(ratios, dtype=torch.double).log()).requires_grad_()
    tokens = TensorDict(
        {
            "old_logprobs": old_logprobs,
            "rollout_logprobs": torch.full_like(old_logprobs, engine),
            "advantages": torch.tensor(advantages, dtype=torch.double),
            "demonstration": torch.zeros(count, dtype=torch.bool),
            "row": torch.tensor(row or list(range(count))),
        },
        batch_size=[count],
    )
    value, metrics = loss(logprobs, tokens)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert not any(m.requires_grad for m in metrics.values())
    return value.tolist(), gradient.tolist(), metrics


def of_cases(loss, old=-1.3):
    return evaluate(loss, [w for w, _ in CASES], [a for _, a in CASES], old=old)


# ---------------------------------------------------------------- REINFORCE


def test_reinforce():
    value, gradient, _ = evaluate(Reinforce(), [1.0, 2.0], [0.5, -3.0], old=-2.0)
    # -A log p, with log p = -2 and -2 + ln 2
    assert value == pytest.approx([1.0, 3 * (-2 + math.log(2))])
    assert gradient == [-0.5, 3.0]


# ---------------------------------------------------------------- PPO's dual clip


def test_dual_clip_by_hand():
    value, gradient, metrics = evaluate(
        PPOClip(dual_clip=3.0), [2.0, 4.0, 4.0, 0.5], [-1.0, -1.0, 1.0, -1.0]
    )
    # w A | bounded at 3 | good: PPO's own clip | bad and already rarer: PPO's own clip
    assert value == pytest.approx([2.0, 3.0, -1.2, 0.8])
    assert gradient == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert metrics["clip_frac"].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dual", [None, 1.15, 3.0])
def test_ppo_in_all_cases(dual):
    low, high = 0.2, 0.2
    value, gradient, metrics = of_cases(PPOClip(low, high, dual))
    for (w, a), v, g, cut in zip(CASES, value, gradient, metrics["clip_frac"], strict=True):
        objective = min(w * a, min(max(w, 1 - low), 1 + high) * a)
        active = w * a == objective
        if dual is not None and a < 0 and dual * a > objective:
            objective, active = dual * a, False
        assert v == pytest.approx(-objective, abs=1e-12), (w, a)
        assert g == pytest.approx(-w * a if active else 0.0, abs=1e-12), (w, a)
        assert bool(cut) is (not active), (w, a)


@pytest.mark.parametrize("dual", [1.0, 0.5, -1.0])
def test_a_dual_clip_that_would_cut_everything_is_refused(dual):
    with pytest.raises(ConfigError, match=rf"dual_clip={dual} must be > 1"):
        PPOClip(dual_clip=dual)


# ---------------------------------------------------------------- GSPO


def test_gspo_by_hand():
    # Sequence ratios: sqrt(4 * 1) = 2, (1/8 * 1 * 1)^(1/3) = 0.5, and 1
    ratios, row = [4.0, 1.0, 0.125, 1.0, 1.0, 1.0], [0, 0, 1, 1, 1, 2]
    loss = GSPO(clip_low=0.25, clip_high=0.5)
    value, gradient, metrics = evaluate(loss, ratios, [1.0] * 6, row)
    assert value == pytest.approx([-1.5, -1.5, -0.5, -0.5, -0.5, -1.0])
    assert gradient == pytest.approx([0, 0, -0.5, -0.5, -0.5, -1.0])
    assert metrics["clip_frac"].tolist() == [1, 1, 0, 0, 0, 0]
    value, gradient, _ = evaluate(loss, ratios, [-1.0] * 6, row)
    assert value == pytest.approx([2, 2, 0.75, 0.75, 0.75, 1.0])
    assert gradient == pytest.approx([2, 2, 0, 0, 0, 1.0])


def test_gspo_is_the_sequence_objective():
    """Mean over tokens = the paper's eq. 5: its value, and its gradient through s itself."""
    generator = torch.Generator().manual_seed(0)
    low, high, n = 0.1, 0.15, 40
    row = torch.repeat_interleave(torch.arange(n), torch.randint(1, 9, (n,), generator=generator))
    count = row.bincount()
    old = -torch.rand(len(row), generator=generator, dtype=torch.double)
    noise = torch.randn(len(row), generator=generator, dtype=torch.double)
    logprobs = (old + 0.5 * noise).requires_grad_()
    advantages = torch.randn(n, generator=generator, dtype=torch.double)
    sequences = []
    for i in range(n):
        s = (logprobs - old)[row == i].mean().exp()
        sequences.append(-min(s * advantages[i], s.clamp(1 - low, 1 + high) * advantages[i]))
    expected = torch.stack(sequences).mean()
    tokens = TensorDict(
        {"old_logprobs": old, "advantages": advantages[row], "row": row}, batch_size=[len(row)]
    )
    value, metrics = GSPO(low, high)(logprobs, tokens)
    ours = (value / count[row] / n).sum()
    assert 0 < metrics["clip_frac"].mean() < 1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logprobs), torch.autograd.grad(expected, logprobs),
        rtol=0, atol=1e-12,
    )  # fmt: skip


# ---------------------------------------------------------------- CISPO


def test_cispo_by_hand():
    loss = CISPO(clip_low=0.5, clip_high=1.0)
    value, gradient, metrics = evaluate(loss, [0.25, 1.5, 4.0], [1.0, -1.0, 1.0], old=-2.0)
    # weights 0.5, 1.5 and 2 on -A log p; the gradient is the weight's, also where it is clipped
    logp = [-2 + math.log(w) for w in (0.25, 1.5, 4.0)]
    assert value == pytest.approx([-0.5 * logp[0], 1.5 * logp[1], -2 * logp[2]])
    assert gradient == pytest.approx([-0.5, 1.5, -2.0])
    assert metrics["clip_frac"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.2, 0.28), (3.0, 5.0)])
def test_cispo_in_all_cases(low, high):
    value, gradient, metrics = of_cases(CISPO(low, high), old=-2.0)
    for (w, a), v, g, cut in zip(CASES, value, gradient, metrics["clip_frac"], strict=True):
        weight = min(max(w, 1 - low, 0), 1 + high)
        assert v == pytest.approx(-weight * a * (-2 + math.log(w)), abs=1e-12), (w, a)
        assert g == pytest.approx(-weight * a, abs=1e-12), (w, a)
        assert bool(cut) is not math.isclose(weight, w), (w, a)


# ---------------------------------------------------------------- SAPO


def test_sapo_by_hand():
    value, gradient, metrics = evaluate(SAPO(1.0, 2.0), [1.0, 1.0, 1 + math.log(3)], [1, -1, 1])
    # f(1) = 2 / tau with slope 1; sigmoid(ln 3) = 3/4, so f = 3 and its slope 4 * 3/16
    assert value == pytest.approx([-2.0, 1.0, -3.0])
    assert gradient == pytest.approx([-1.0, 1.0, -0.75 * (1 + math.log(3))])
    assert metrics["gate"].tolist() == pytest.approx([1.0, 1.0, 0.75])


@pytest.mark.parametrize("tau", [(1.0, 1.05), (0.5, 4.0)])
def test_sapo_in_all_cases(tau):
    value, gradient, _ = of_cases(SAPO(*tau))
    for (w, a), v, g in zip(CASES, value, gradient, strict=True):
        t = tau[0] if a > 0 else tau[1]
        # Gao et al., eqs. 6 and 8: 4 / tau sigmoid(tau (w - 1)), sech^2(tau / 2 (w - 1)) w A
        gate = 4 / t / (1 + math.exp(-t * (w - 1)))
        slope = 1 / math.cosh(t / 2 * (w - 1)) ** 2
        assert v == pytest.approx(-gate * a, rel=1e-6, abs=1e-12), (w, a)
        assert g == pytest.approx(-slope * w * a, rel=1e-6, abs=1e-12), (w, a)


# ---------------------------------------------------------------- other trust regions


def test_dppo_by_hand():
    """A probability of 0.4 moves up by 0.1 or 0.32, or down by 0.1 or 0.3; then rare ones move."""
    w, a = [1.25, 1.8, 0.75, 0.25, 1.8, 0.25], [1, 1, -1, -1, -1, 1]
    value, gradient, metrics = evaluate(DPPO(square=0.0), w, a, old=math.log(0.4))
    assert value == pytest.approx([-1.25, 0, 0.75, 0, 1.8, -0.25])
    assert gradient == pytest.approx([-1.25, 0, 0.75, 0, 1.8, -0.25])
    assert metrics["clip_frac"].tolist() == [0, 1, 0, 1, 0, 0]
    value, gradient, metrics = evaluate(DPPO(square=0.5), [9.0, 9.0], [1, 0], old=math.log(0.01))
    square = 0.5 * math.log(9) ** 2  # whose derivative is log 9
    assert value == pytest.approx([-9 + square, square])
    assert gradient == pytest.approx([-9 + math.log(9), math.log(9)])
    assert metrics["clip_frac"].tolist() == [0, 0]  # nine times as likely, and 0.08 more
    assert DPPO(square=0.0).zero_at_zero_advantage
    assert not DPPO().zero_at_zero_advantage


def test_gmpo_by_hand():
    # Log ratios clamped at ±ln 2 where PPO would clip: sqrt(2 * 1), then sqrt(8 * 1/4).
    ratios, row = [4.0, 1.0, 8.0, 0.25], [0, 0, 1, 1]
    loss = GMPO(clip_low=math.log(2), clip_high=math.log(2))
    value, gradient, metrics = evaluate(loss, ratios, [1.0, 1.0, -1.0, -1.0], row)
    first, second = math.sqrt(2.0), math.sqrt(8 / 2)
    assert value == pytest.approx([-first, -first, second, second])
    assert gradient == pytest.approx([0, -first, second, 0])
    assert metrics["clip_frac"].tolist() == [1, 0, 0, 1]


def test_vespo_by_hand():
    # Sequence ratios 1 and 2 * 3 / 2 = 3: phi(3) = 3^k exp(rate (1 - 3)), of k 3 and rate 1 if bad.
    ratios, row = [1.0, 2.0, 3.0, 0.5], [0, 1, 1, 1]
    loss = VESPO(k_positive=2.0, rate_positive=0.5, k_negative=3.0, rate_negative=1.0)
    logp = [-2 + math.log(w) for w in ratios]
    for a, phi in ((2.0, 9 * math.exp(-1)), (-2.0, 27 * math.exp(-2))):
        value, gradient, metrics = evaluate(loss, ratios, [a] * 4, row, old=-2.0)
        weights = [1.0, phi, phi, phi]
        assert value == pytest.approx([-w * a * x for w, x in zip(weights, logp, strict=True)])
        assert gradient == pytest.approx([-w * a for w in weights])
        assert metrics["sequence_weight"].tolist() == pytest.approx(weights)


def test_topr_by_hand():
    """Good rollouts weigh 1; bad ones their ratio, 2 * 3 / 2 = 3 and 0.25, as far as the bound."""
    ratios, row = [2.0, 2.0, 3.0, 0.5, 0.25], [0, 1, 1, 1, 2]
    logp = [-2 + math.log(w) for w in ratios]
    advantages = [3.0, -2.0, -2.0, -2.0, -1.0]
    for bound, weights in ((1.0, [1, 1, 1, 1, 0.25]), (2.5, [1, 2.5, 2.5, 2.5, 0.25])):
        value, gradient, metrics = evaluate(TOPR(bound), ratios, advantages, row, old=-2.0)
        terms = list(zip(weights, advantages, logp, strict=True))
        assert value == pytest.approx([-w * a * x for w, a, x in terms])
        assert gradient == pytest.approx([-w * a for w, a, _ in terms])
        assert metrics["taper"].tolist() == pytest.approx(weights)


def test_bad_rollouts_that_have_become_unlikely_are_left_out():
    """The mean over the rollout counts, and the engine's logprobs, not the old policy's."""
    loss = OffPolicyMask(Reinforce(), threshold=0.1)
    # Gaps to the engine in the mean: ln 4 / 2 = 0.69, ln 1.1 = 0.095, and 0.69 of a good one.
    ratios, row = [0.25, 1.0, 1 / 1.1, 0.5], [0, 0, 1, 2]
    value, gradient, metrics = evaluate(loss, ratios, [-1.0, -1.0, -1.0, 1.0], row)
    logp = [-1.3 + math.log(w) for w in ratios]
    assert value == pytest.approx([0, 0, logp[2], -logp[3]])
    assert gradient == pytest.approx([0, 0, 1, -1])
    assert metrics["masked_share"].tolist() == [1, 1, 0, 0]
    _, gradient, _ = evaluate(loss, ratios, [-1.0] * 4, row, engine=-2.0)
    assert gradient == pytest.approx([1.0] * 4)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "loss",
    [*public_losses(), PPOClip(dual_clip=3.0), SAPO(0.5, 3.0)],
)
def test_on_policy_all_have_the_gradient_of_reinforce(loss):
    _, gradient, metrics = evaluate(loss, [1.0] * 3, [2.0, -1.0, 0.0], row=[0, 1, 1])
    # GSPO's bounds are met exactly at 1; the two tokens of its second rollout share s = 1.
    assert gradient == pytest.approx([-2.0, 1.0, 0.0], rel=1e-6)
    assert metrics["kl_old"].tolist() == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: GSPO(clip_low=1.0), "0 < clip_low < 1"),
        (lambda: GSPO(clip_high=0.0), "clip_high > 0"),
        (lambda: CISPO(clip_low=-0.5), r"CISPO\(clip_low=-0.5"),
        (lambda: CISPO(clip_high=0.0), "both must be > 0"),
        (lambda: SAPO(tau_positive=0.0), "both must be > 0"),
        (lambda: SAPO(tau_negative=-1.0), "both must be > 0"),
        (lambda: DPPO(low=0.0), r"DPPO\(low=0.0, high=0.2\): .* > 0 and <= 1"),
        (lambda: DPPO(square=-1.0), "square=-1.0 must be >= 0"),
        (lambda: GMPO(clip_high=0.0), r"GMPO\(clip_low=0.4, clip_high=0.0\)"),
        (lambda: TOPR(bound=0.0), r"TOPR\(bound=0.0\): .* must be > 0"),
        (lambda: TOPR(bound=math.nan), "bound=nan must be finite"),
        (lambda: VESPO(k_negative=-1.0), "k_negative=-1.0 must be >= 0"),
    ],
)
def test_impossible_parameters_are_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        loss()


@pytest.mark.parametrize(
    "loss",
    [Reinforce(), PPOClip(dual_clip=1.5), GSPO(0.01, 0.02), CISPO(0.2, 0.3), SAPO(),
     DPPO(0.01, 0.01), GMPO(0.1, 0.1), VESPO(), TOPR(), OffPolicyMask(threshold=0.01)],
)  # fmt: skip
def test_updates_do_not_depend_on_micro_batches_or_order(
    tiny_model, train_on, random_rollouts, loss
):
    """Two epochs of large steps, so that ratios leave 1; the first has no ratio but 1."""
    weights, clipped = [], []
    rollouts = random_rollouts(31)
    for budget, arranged in ((100_000, rollouts), (25, rollouts[::-1])):
        module = PolicyModule(
            str(tiny_model), loss=loss,
            update={"ppo_epochs": 2, "max_tokens_per_micro_batch": budget, "max_grad_norm": None},
            optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        )  # fmt: skip
        train_on(module, [pack_rollouts(arranged)])
        clipped.append(module.trainer.callback_metrics["policy/kl_old"])
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert clipped[0] > 1e-4  # the second epoch was off policy
    for other in weights[1:]:
        assert distance(other, weights[0]) < gradient_rounding(tiny_model, tokens=100)
