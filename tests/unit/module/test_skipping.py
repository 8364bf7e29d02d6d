"""Rollouts without advantage are left out of the update, which changes nothing but its cost."""

import pytest
import torch

from lightning_rl.algos.advantages import GAE, GRPO, group_means
from lightning_rl.algos.baselines import OPMD
from lightning_rl.algos.correction import SequenceMIS, TokenTIS
from lightning_rl.algos.kl import EntropyBonus, K1Penalty, K3Penalty
from lightning_rl.algos.losses import PolicyLoss, PPOClip, SFTMix
from lightning_rl.algos.objective import PromptMean, SequenceMean, TokenMean, TokenSum
from lightning_rl.algos.trust_regions import DPPO
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.learn.skipped import has_zero_advantage, without
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped
from tests.support.losses import public_losses
from tests.support.tolerances import distance, gradient_rounding, scores_rounding

LOSSES = [
    *(loss for loss in public_losses() if loss.zero_at_zero_advantage),
    PPOClip(dual_clip=3.0), DPPO(square=0.0),
]  # fmt: skip


@pytest.fixture
def rollouts(random_rollouts):
    """Make seven groups, four of them with equal rewards; one completion was cut off."""
    made = random_rollouts(41, groups=7)
    for rollout in made:
        group = int(rollout.group_id)
        rollout.reward = 0.1 if group % 2 == 0 else rollout.sample_index / 2
    made[5].finish_reason = "length"
    return made


def adamw(parameters):
    # Momentum and decay move weights even where the gradient is zero. With a small eps a gradient
    # that is nothing but rounding would move them as far as a real one.
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-4)


def weights_after(tiny_model, train_on, batches, skip, **options):
    """Return weights after training with or without skipping, and the last metrics."""
    module = PolicyModule(str(tiny_model), optimizer=adamw, **grouped(**options))
    assert module.skipped.zero_advantage
    module.skipped.zero_advantage = skip
    trainer = train_on(module, batches())
    state = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_weights_are_those_of_all_rollouts(tiny_model, train_on, rollouts, loss):
    rollouts[6].demonstration = isinstance(loss, SFTMix)  # in a group without spread
    options = {"loss": loss, "minibatches": 2, "max_tokens_per_micro_batch": 60}
    (ours, metrics), (theirs, _) = (
        weights_after(tiny_model, train_on, lambda: [pack_rollouts(rollouts)] * 2, skip, **options)
        for skip in (True, False)
    )
    assert distance(ours, theirs) < gradient_rounding(tiny_model, tokens=100)
    # 4 of 7 groups, and (a group's rewards are 0, 1/2, 1) the middle one of each of the others
    idle = 4 * 3 + 3 - isinstance(loss, SFTMix)
    assert metrics["policy/skipped_share"] == pytest.approx(idle / 21, abs=0.02)


@pytest.mark.parametrize(
    "aggregation",
    [TokenMean(), SequenceMean(), PromptMean(), TokenSum(9)],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("correction", [TokenTIS(), SequenceMIS(0.0)], ids=["token", "sequence"])
def test_what_is_left_out_counts_in_the_averages(
    tiny_model, train_on, rollouts, aggregation, correction
):
    options = {"aggregation": aggregation, "correction": correction, "mask_truncated": True}
    ours, theirs = (
        weights_after(tiny_model, train_on, lambda: [pack_rollouts(rollouts)], skip, **options)[0]
        for skip in (True, False)
    )
    assert distance(ours, theirs) < gradient_rounding(tiny_model, tokens=100)


def test_with_nothing_to_learn_the_optimizer_steps_all_the_same(
    tiny_model, train_on, rollouts, random_rollouts
):
    alike = random_rollouts(42)
    for rollout in alike:
        rollout.reward = 0.3
    batches = [pack_rollouts(rollouts), pack_rollouts(alike)]
    options = {"minibatches": 2}
    (ours, metrics), (theirs, _), (before, _) = (
        weights_after(tiny_model, train_on, lambda b=b: [x.clone() for x in b], skip, **options)
        for b, skip in ((batches, True), (batches, False), (batches[:1], True))
    )
    assert distance(ours, theirs) < gradient_rounding(tiny_model, tokens=100)
    assert float((ours - before).abs().max()) > 1e-4  # AdamW's momentum
    assert metrics["policy/skipped_share"] == 1
    assert metrics["policy/grad_norm"] == 0


def test_old_logprobs_are_of_the_rollouts_that_will_be_trained_on(tiny_model, rollouts):
    module = PolicyModule(str(tiny_model))
    module.configure_model()
    learner = module.learner
    everything = learner.compute_old_logprobs(pack_rollouts(rollouts))["tokens", "old_logprobs"]
    batch = learner.compute_old_logprobs(learner.compute_advantages(pack_rollouts(rollouts)))
    moving = batch["tokens", "advantages"] != 0
    bound = scores_rounding(tiny_model, everything)
    torch.testing.assert_close(
        batch["tokens", "old_logprobs"][moving], everything[moving], rtol=0, atol=bound
    )
    alike = torch.tensor([g % 2 == 0 for g in range(7) for _ in range(3)])
    lengths = batch["rollouts", "length"]
    idle = torch.repeat_interleave(alike, lengths)
    # The engine's: a zero would read as a certain token, and as a KL where there is none.
    old, written = batch["tokens", "old_logprobs"], batch["tokens", "rollout_logprobs"]
    assert written[idle].any()
    assert torch.equal(old[idle], written[idle])


class Anchored(PolicyLoss):
    """A loss that pulls at every token, whatever its advantage."""

    def __call__(self, logprobs, tokens):
        return -tokens["advantages"] * logprobs + 0.1 * logprobs**2, {}


@pytest.mark.parametrize(
    "options",
    [
        {"kl": K3Penalty()},
        {"kl_reward": K1Penalty()},
        {"entropy": EntropyBonus()},
        {"advantage": GAE(), "critic": SharedValueHead()},
        {"loss": Anchored()},
        {"loss": SFTMix(Anchored())},
    ],
    ids=["kl", "kl_reward", "entropy", "critic", "loss", "mixed loss"],
)
def test_nothing_is_skipped_where_more_than_advantages_moves_the_policy(options):
    assert PolicyModule("model").skipped.zero_advantage
    assert not PolicyModule("model", **grouped(**options)).skipped.zero_advantage


def test_is_idle_by_hand(make_rollout):
    batch = pack_rollouts(
        [
            make_rollout([3], [4, 1]),
            make_rollout([3], [5, 1], loss_mask=[False, True]),
            make_rollout([3], [6]),
            make_rollout([3], [7, 8, 1]),
        ]
    )
    # The second one's advantage stands on a token that is not the model's; the third is an expert.
    advantages = [*(0, 0, 1), *(0, 9, 0), *(0, 0), *(0, 0, 0, 0)]
    batch["tokens", "advantages"] = torch.tensor(advantages, dtype=torch.float32)
    batch["rollouts", "demonstration"][2] = True
    assert has_zero_advantage(batch).tolist() == [False, True, False, True]
    others = without(batch, has_zero_advantage(batch))
    assert others["tokens", "input_ids"].tolist() == [3, 4, 1, 3, 6]


def test_equal_rewards_have_no_advantage_at_all(make_rollout):
    """The float32 mean of seven times 0.1 is not 0.1; GRPO would divide that by no spread."""
    rewards = torch.full((24,), 0.1)
    group = torch.tensor([0] * 7 + [1] * 17)
    assert torch.equal(group_means(rewards, group), rewards)
    batch = pack_rollouts([make_rollout([3], [4], reward=0.1) for _ in range(7)])
    assert not GRPO()(batch)["tokens", "advantages"].any()
    assert not OPMD()(batch)["tokens", "advantages"].any()
