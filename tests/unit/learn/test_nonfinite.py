"""Test infinite and NaN values: refused as a setting, bounded in a ratio, kept from the weights."""

import math
import re

import pytest
import torch
from lightning.fabric import Fabric
from tensordict import TensorDict

import lightning_rl as rl
from lightning_rl.algos.kl import k2, k3
from lightning_rl.algos.losses import ValueLoss, ppo_clip
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.learn.own_loop import OwnLoop
from lightning_rl.learn.precision import check_optimizer
from lightning_rl.learn.schedulers import WarmupLinear
from lightning_rl.rewards.base import Rewards
from tests.support.losses import public_losses
from tests.support.small_run import adamw, data_module, grpo

# ---------------------------------------------------------------- settings

SETTINGS = [
    (rl.PPOClip, "clip_low"), (rl.PPOClip, "clip_high"), (rl.PPOClip, "dual_clip"),
    (rl.GSPO, "clip_low"), (rl.GSPO, "clip_high"),
    (rl.CISPO, "clip_low"), (rl.CISPO, "clip_high"),
    (rl.SAPO, "tau_positive"), (rl.SAPO, "tau_negative"),
    (rl.DPPO, "low"), (rl.DPPO, "square"), (rl.GMPO, "clip_low"), (rl.GMPO, "clip_high"),
    (rl.VESPO, "k_positive"),  (rl.OffPolicyMask, "threshold"),
    (rl.SFTMix, "coef"), (ValueLoss, "coef"), (ValueLoss, "clip"),
    (rl.GRPO, "eps"), (rl.GDPO, "eps"), (rl.GAE, "gamma"), (rl.GAE, "lam"), (rl.OPMD, "tau"),
    (rl.PassAtK, "success_reward"), (rl.RunningBaseline, "decay"),
    (rl.K1Penalty, "coef"), (rl.K2Penalty, "coef"), (rl.K3Penalty, "coef"),
    (rl.extend.ConstantSchedule, "value"),
    (rl.extend.AdaptiveCoefficient, "value"), (rl.extend.AdaptiveCoefficient, "target"),
    (rl.extend.AdaptiveCoefficient, "gain"),
    (rl.EntropyBonus, "coef"),
    (rl.TokenTIS, "cap"), (rl.SequenceTIS, "cap"), (rl.GeometricTIS, "cap"),
    (rl.TokenMIS, "low"), (rl.TokenMIS, "high"), (rl.SequenceMIS, "high"),
    (rl.GeometricMIS, "high"),
    (Sampling, "temperature"), (Sampling, "top_p"),
    (rl.RewardSpread, "min_spread"), (rl.extend.RewardPriority, "temperature"),
    (rl.extend.AdvantagePriority, "alpha"), (rl.extend.Mixed, "replayed"),
    (rl.extend.Mixed, "demonstration_reward"),
    (rl.LoRA, "alpha"), (rl.PartialCollector, "over_issue"),
    (rl.callbacks.KLGuard, "bound"), (rl.callbacks.LogprobGapGuard, "bound"),
    (rl.callbacks.LengthGuard, "bound"),
]  # fmt: skip
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("kind", "key"), SETTINGS, ids=lambda x: getattr(x, "__name__", x))
def test_no_part_takes_a_number_that_is_none(kind, key, value):
    with pytest.raises(ConfigError, match=rf"{value}\b"):
        kind(**{key: value})


@pytest.mark.parametrize("value", BAD)
def test_nor_do_modules_and_data(tiny_model, value):
    with pytest.raises(ConfigError, match=f"max_grad_norm={value}"):
        grpo(tiny_model, max_grad_norm=value)
    with pytest.raises(ConfigError, match=rf"critic\.lr={value}"):
        rl.Critic(rl.SharedValueHead(), lr=value)
    for options in ({"beta": value}, {"smoothing": value}):
        with pytest.raises(ConfigError, match=f"={value}"):
            rl.DPOModule(str(tiny_model), **options)
    for key, given in (
        ("success_reward", value), ("reward_weights", [value]), ("max_failed_share", value)
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            data_module(**{key: given})
    for key in ("success_reward", "floor", "memory"):
        with pytest.raises(ConfigError, match=key):
            rl.PassRateCurriculum(IterablePrompts([]), **{key: value})
    with pytest.raises(ConfigError, match="final"):
        WarmupLinear(torch.optim.SGD([torch.zeros(1)], 0.1), total_steps=3, final=value)
    with pytest.raises(ConfigError, match="fault_score"):
        rl.Isolated(max, fault_score=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": math.inf}, "optimizer.lr=inf must be finite"),
        ({"lr": 1.0, "weight_decay": math.inf}, "optimizer.weight_decay=inf"),
    ],
)
@pytest.mark.parametrize("kind", [rl.PolicyModule, rl.SFTModule, rl.DPOModule])
def test_an_optimizer_with_such_options_is_refused(tiny_model, kind, options, message):
    module = kind(str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, **options))
    module.configure_model()
    with pytest.raises(ConfigError, match=message):
        module.configure_optimizers()


@pytest.mark.parametrize("kind", [rl.PolicyModule, rl.SFTModule, rl.DPOModule])
def test_an_optimizer_that_evaluates_the_loss_itself_is_refused_by_name(tiny_model, kind):
    module = kind(str(tiny_model), optimizer=torch.optim.LBFGS)
    module.configure_model()
    with pytest.raises(ConfigError, match=r"optimizer=LBFGS evaluates the loss.*use AdamW"):
        module.configure_optimizers()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor,
                                  torch.optim.RAdam, torch.optim.Muon])  # fmt: skip
def test_others_are_not(kind):
    check_optimizer(lambda p: kind(p, lr=0.1))


# ---------------------------------------------------------------- log ratios

LOSSES = [*public_losses(), rl.PPOClip(dual_clip=3.0)]


def gradient_of(loss, log_ratio: float, advantage: float):
    """Return value and gradient of a float32 token, whose policy moved by ``log_ratio`` nats."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    tokens = TensorDict(
        {
            "old_logprobs": torch.tensor([-1.0 - log_ratio]),
            "rollout_logprobs": torch.tensor([-1.0 - log_ratio]),
            "advantages": torch.tensor([advantage]),
            "demonstration": torch.tensor([False]),
            "row": torch.tensor([0]),
        },
        batch_size=[1],
    )
    value, metrics = loss(logprobs, tokens)
    value.sum().backward()
    assert all(bool(m.isfinite().all()) for m in metrics.values())
    return float(value), float(logprobs.grad)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [89.0, 200.0, -89.0, -200.0])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_no_log_ratio_makes_a_loss_infinite(loss, log_ratio, advantage):
    assert all(map(math.isfinite, gradient_of(loss, log_ratio, advantage)))


@pytest.mark.parametrize("log_ratio", [-19.9, -5.0, -0.1, 0.0, 0.1, 5.0, 19.9])
def test_no_gradient_in_range_is_changed(log_ratio):
    """-A w, whose derivative is -A w too, where the clip does not take it away: in float64."""
    ratio = torch.tensor([log_ratio], dtype=torch.double, requires_grad=True)
    for advantage in (1.0, -1.0):
        ratio.grad = None
        a = torch.full_like(ratio, advantage)
        ppo_clip(ratio, torch.zeros_like(ratio), a, 0.2, 0.2)[0].sum().backward()
        w = math.exp(log_ratio)
        active = w < 1.2 if advantage > 0 else w > 0.8
        assert float(ratio.grad) == pytest.approx(-advantage * w if active else 0.0, rel=1e-14)


def test_estimators_of_the_kl_far_from_the_reference():
    logprobs = torch.tensor([-1.0, -1.0, -95.0, -95.0], requires_grad=True)
    reference = torch.tensor([-21.5, -95.0, -1.0, -75.5])
    value = k3(logprobs, reference)
    value.sum().backward()
    assert value.isfinite().all()
    # d = -20.5, -94, 94 and 19.5; the gradient 1 - exp(d) is that of the formula up to d = 20.
    expected = [1.0, 1.0, 0.0, 1 - math.exp(19.5)]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert value.tolist()[:2] == pytest.approx([19.5, 93.0])
    assert k2(torch.tensor(-1.0), torch.tensor(-201.0)) == 20_000


def test_one_absurd_rollout_ruins_nothing(tiny_model, train_on, random_batch):
    """Engine logprobs of -200 are taken for the old policy's: ratios of exp(199)."""
    module = grpo(tiny_model, use_rollout_logprobs=True, advantage=rl.DrGRPO())
    batch = random_batch(41)
    batch["tokens", "rollout_logprobs"][: int(batch["rollouts", "length"][0])] = -200.0
    train_on(module, [batch, random_batch(42)])
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert float(module.trainer.callback_metrics["policy/nonfinite_skipped"]) == 0


def test_nor_does_a_loop_without_a_trainer_step_on_nan(tiny_model, random_batch):
    module = grpo(tiny_model)
    learner = OwnLoop(module, Fabric(accelerator="cpu")).learner
    before = [p.clone() for p in module.parameters()]
    batch = learner.compute_advantages(random_batch(46))
    batch["tokens", "advantages"][:] = math.nan
    assert learner.update(batch)["policy/nonfinite_skipped"] == 1
    assert all(map(torch.equal, before, module.parameters()))
    batch = learner.compute_advantages(random_batch(47))
    assert learner.update(batch)["policy/nonfinite_skipped"] == 0
    assert not all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_supervised_training_leaves_such_steps_out_too(tiny_model, train_on, random_batch, bad):
    class Poisoned(rl.SFTModule):
        def sums(self, batch):
            loss, weight = super().sums(batch)["loss"]
            return {"loss": (loss * (bad if batch["rollouts", "reward"][0] < 0 else 1.0), weight)}

    poison = random_batch(43)
    poison["rollouts", "reward"][0] = -1.0
    modules = [Poisoned(str(tiny_model), optimizer=adamw(1e-3)) for _ in range(2)]
    train_on(modules[0], [random_batch(44), random_batch(45)])
    train_on(modules[1], [random_batch(44), poison, random_batch(45)])
    assert modules[1].nonfinite_steps == 1
    for ours, theirs in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("score", "weight", "reason"),
    [
        (1e308, 1.0, r"returned 1e\+308; a score must be within ±1e6"),
        (-2e6, 1.0, "returned -2000000.0; a score must be within ±1e6"),
        (10**400, 1.0, "a score must be a finite number or None"),
        (1e6, 3.0, r"the weighted sum of rewards, 3e\+06, is beyond ±1e6"),
    ],
)
def test_a_reward_out_of_all_proportion_fails_its_rollout_alone(
    make_rollout, score, weight, reason
):
    group = [make_rollout([3], [4, 1], reward=None) for _ in range(3)]
    rewards = Rewards([lambda completions: [1.0, score, 0.0]], [weight])
    rewards.grade_here([group])
    assert [r.graded for r in group] == [True, False, True]
    assert torch.tensor([r.reward for r in group if r.graded]).isfinite().all()
    assert re.search(reason, group[1].error)
    kept = rl.GRPO()(pack_rollouts([r for r in group if r.graded]))
    assert kept["tokens", "advantages"].isfinite().all()
