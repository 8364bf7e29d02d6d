"""PolicyModule's options: value warm-up, truncated rollouts, the engine's logprobs as old ones."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict
from torch import nn

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.kl import EntropyBonus, K3Penalty
from lightning_rl.algos.losses import PPOClip, Reinforce, ValueLoss
from lightning_rl.algos.objective import Objective, PromptMean, SequenceMean, TokenMean, TokenSum
from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.learn.critic import Critic
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.policy import Scores
from lightning_rl.models.reference import FrozenReference
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped
from tests.support.tolerances import distance, gradient_rounding


def module_of(tiny_model, **options) -> PolicyModule:
    options = {"max_grad_norm": None, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | options
    module = PolicyModule(str(tiny_model), **grouped(**options))
    module.configure_model()
    return module


def gradient(module) -> torch.Tensor:
    parameters = module.policy.lm.parameters()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in parameters])  # fmt: skip


# ---------------------------------------------------------------- all parts together


def test_the_sum_of_all_parts_by_hand():
    logprobs, entropy, values = (
        torch.tensor([x], dtype=torch.double, requires_grad=True) for x in (-1.0, 0.7, 0.5)
    )
    tokens = TensorDict(
        {
            "old_logprobs": torch.tensor([-1.0]),
            "rollout_logprobs": torch.tensor([-1.0]) - torch.tensor([1.5]).log(),
            "ref_logprobs": torch.tensor([-2.0]),
            "advantages": torch.tensor([2.0]),
            "returns": torch.tensor([1.5]),
            "values": torch.tensor([0.5]),
            "row": torch.tensor([0]),
            "demonstration": torch.tensor([False]),
        },
        batch_size=[1],
    )
    objective = Objective(
        PPOClip(), TokenTIS(), K3Penalty(0.1), EntropyBonus(0.01), ValueLoss(coef=0.5)
    )
    loss, metrics = objective(Scores(torch.tensor([0]), logprobs, entropy, values), tokens, 0)
    # -1.5 * 2 + 0.1 * (exp(-1) - (-1) - 1) - 0.01 * 0.7 + 0.5 * 0.5 * 1^2
    kl = 0.36787944
    assert loss.tolist() == pytest.approx([-3 + 0.1 * kl - 0.007 + 0.25])
    assert metrics["policy/kl_ref"].tolist() == pytest.approx([kl])
    assert float(metrics["value/value_error"]) == pytest.approx(1.0)
    loss.backward()
    assert float(logprobs.grad) == pytest.approx(-3 + 0.1 * (1 - kl))  # dk3/dlogp = 1 - exp(d)
    assert float(entropy.grad) == pytest.approx(-0.01)
    assert float(values.grad) == pytest.approx(-0.5)


# ---------------------------------------------------------------- value warm-up


class Weights(Callback):
    """The LM's and the critic's weights after every iteration."""

    def __init__(self) -> None:
        self.lm: list[torch.Tensor] = []
        self.critic: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        for name, module in (("lm", pl_module.policy.lm), ("critic", pl_module.policy.value_head)):
            flat = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
            getattr(self, name).append(flat)


@pytest.mark.parametrize("head", [lambda: SharedValueHead(detach=True), SeparateValueHead])
def test_warm_up_trains_the_critic_alone(tiny_model, train_on, random_batch, head):
    module = module_of(
        tiny_model, advantage=GAE(), critic=Critic(head(), warmup_iterations=2), ppo_epochs=2,
        kl=K3Penalty(0.1), entropy=EntropyBonus(0.1),
    )  # fmt: skip
    start = nn.utils.parameters_to_vector(module.policy.lm.parameters()).detach().clone()
    weights = Weights()
    train_on(module, [random_batch(s) for s in (1, 2, 3)], callbacks=[weights])
    assert torch.equal(weights.lm[0], start)
    assert torch.equal(weights.lm[1], start)
    assert not torch.equal(weights.lm[2], start)
    assert weights.critic[0].any()  # a head of zeros before
    assert not torch.equal(weights.critic[1], weights.critic[0])


def test_after_warm_up_the_iteration_is_an_ordinary_one(tiny_model, train_on, random_batch):
    """The LM did not move, so its step is the first of a run whose critic is the warmed-up one."""
    head = SharedValueHead(detach=True)
    module = module_of(tiny_model, advantage=GAE(), critic=Critic(head, warmup_iterations=1))
    train_on(module, [random_batch(1)])
    warmed = {name: p.clone() for name, p in module.policy.value_head.state_dict().items()}
    train_on(module, [random_batch(2)])
    other = module_of(tiny_model, advantage=GAE(), critic=SharedValueHead(detach=True))
    other.policy.value_head.load_state_dict(warmed)
    train_on(other, [random_batch(2)])
    for mine, theirs in zip(module.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


# ---------------------------------------------------------------- truncated rollouts


def truncated(rollouts):
    """Truncate every third rollout at max_tokens."""
    for i, rollout in enumerate(rollouts):
        rollout.finish_reason = "length" if i % 3 == 1 else "stop"
    return rollouts


@pytest.mark.parametrize(
    ("rule", "budget"),
    [(TokenMean(), 25), (SequenceMean(), 100_000), (PromptMean(), 40), (TokenSum(10), 25)],
)
def test_truncated_rollouts_have_no_gradient_and_the_rest_is_reweighed(
    tiny_model, train_on, random_rollouts, rule, budget
):
    rollouts = truncated(random_rollouts(71))
    module = module_of(
        tiny_model, mask_truncated=True, aggregation=rule, max_tokens_per_micro_batch=budget
    )
    train_on(module, [pack_rollouts(rollouts)])
    # The same from its definition: advantages of all, then the loss of the others alone.
    plain = module_of(tiny_model)
    batch = GRPO()(pack_rollouts(rollouts))
    kept = ~batch["rollouts", "truncated"][token_rows(batch)]
    batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & kept
    scores = plain.policy(batch)
    advantages = batch["tokens", "advantages"][scores.live]
    weights = rule(batch)[scores.live]
    (-weights * advantages * scores.logprobs).sum().backward()
    expected = gradient(plain)
    assert distance(gradient(module), expected) < gradient_rounding(tiny_model, tokens=100)
    unmasked = module_of(tiny_model, aggregation=rule)
    train_on(unmasked, [pack_rollouts(rollouts)])
    assert float((gradient(unmasked) - expected).norm() / expected.norm()) > 0.01


def test_what_was_truncated_has_a_say_in_the_baseline_only(tiny_model, train_on, make_rollout):
    def rollouts(last):
        return [
            make_rollout([3, 4], [5, 1], reward=1.0, sample_index=0),
            make_rollout([3, 4], [6, 1], reward=0.0, sample_index=1),
            make_rollout([3, 4], last, reward=0.0, finish_reason="length", sample_index=2),
        ]

    gradients = []
    for last in ([7, 8, 9], [10, 3, 3]):
        module = module_of(tiny_model, mask_truncated=True, advantage=GRPO(False))
        train_on(module, [pack_rollouts(rollouts(last))])
        gradients.append(gradient(module))
    assert distance(gradients[1], gradients[0]) < gradient_rounding(tiny_model, tokens=9)


def test_if_all_were_truncated_nothing_moves(tiny_model, train_on, random_rollouts):
    rollouts = random_rollouts(72)
    for rollout in rollouts:
        rollout.finish_reason = "length"
    module = module_of(tiny_model, mask_truncated=True, max_grad_norm=1.0)
    start = nn.utils.parameters_to_vector(module.policy.parameters()).detach().clone()
    train_on(module, [pack_rollouts(rollouts)])
    assert torch.equal(nn.utils.parameters_to_vector(module.policy.parameters()).detach(), start)


# ---------------------------------------------------------------- the engine's logprobs


def test_the_engines_logprobs_stand_in_for_the_old_ones(tiny_model, random_batch):
    module = module_of(tiny_model, use_rollout_logprobs=True)
    batch = module.learner.compute_old_logprobs(random_batch(73))
    assert torch.equal(batch["tokens", "old_logprobs"], batch["tokens", "rollout_logprobs"])


def test_with_a_critic_too(tiny_model, random_batch):
    trusting, plain = (
        module_of(tiny_model, advantage=GAE(), critic=SharedValueHead(), **options)
        for options in ({"use_rollout_logprobs": True}, {})
    )
    for module in (trusting, plain):
        nn.init.constant_(module.policy.value_head.linear.weight, 0.1)
    batch = trusting.learner.compute_old_logprobs(random_batch(73))
    batch = trusting.learner.compute_values(batch)
    expected = plain.learner.compute_values(random_batch(73))
    assert torch.equal(batch["tokens", "old_logprobs"], batch["tokens", "rollout_logprobs"])
    assert torch.equal(batch["tokens", "values"], expected["tokens", "values"])
    assert expected["tokens", "values"].any()


@pytest.mark.parametrize("trust", [False, True])
def test_whose_logprobs_the_first_ratio_is_to(tiny_model, train_on, random_rollouts, trust):
    rollouts = random_rollouts(74)
    for rollout in rollouts:  # each with an advantage, so that each is trained on
        rollout.reward = float(rollout.sample_index**2)
    batch = pack_rollouts(rollouts)
    module = module_of(tiny_model, use_rollout_logprobs=trust, loss=PPOClip(0.9, 9.0))
    with torch.no_grad():
        scores = module.policy(batch)
    engine = batch["tokens", "rollout_logprobs"][scores.live]
    log_ratio = (scores.logprobs - engine).double() if trust else torch.zeros(len(engine))
    train_on(module, [batch])
    metrics = module.trainer.callback_metrics
    expected = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert float(metrics["policy/kl_old"]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert trust is (expected > 0.01)
    # and so without a gap to measure, if those are the same by decree
    assert trust is (float(metrics["rollout/logprob_gap_max"]) == 0)


def test_right_engine_logprobs_change_nothing(tiny_model, train_on, random_batch):
    weights = []
    for trust in (False, True):
        module = module_of(tiny_model, use_rollout_logprobs=trust, ppo_epochs=2)
        batch = module.policy.score(random_batch(75), "rollout_logprobs", 100_000)
        train_on(module, [batch])
        weights.append(nn.utils.parameters_to_vector(module.policy.parameters()).detach())
    assert distance(weights[1], weights[0]) < gradient_rounding(tiny_model, tokens=100)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"critic": Critic(SharedValueHead(), warmup_iterations=3), "loss": Reinforce()},
            r"critic\.warmup_iterations=3 needs an advantage that reads values",
        ),
        ({"reference": FrozenReference()}, "reference=FrozenReference is not used by any KL"),
    ],
)
def test_options_that_do_nothing_are_refused(tiny_model, options, message):
    with pytest.raises(ConfigError, match=message):
        PolicyModule(str(tiny_model), **grouped(**options))
