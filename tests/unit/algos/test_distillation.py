"""Distillation and TeacherDivergence: by hand, against torch's KL, and through a real update."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from lightning_rl import GRPO, Distillation, PolicyModule, PPOClip, SFTMix, TeacherDivergence
from lightning_rl.algos.distillation import generalized_jsd, with_rest
from lightning_rl.algos.losses import Reinforce
from lightning_rl.algos.objective import loss_tokens
from lightning_rl.data import teacher_logprobs
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.teacher_logprobs import TeacherLogprobs
from lightning_rl.errors import ConfigError, DataError
from tests.support.updates import sgd


def taught(make_rollout, theirs, ids=None, top=None, **fields):
    """Make a rollout of some tokens that a teacher has looked at."""
    count = len(theirs)
    ids = torch.zeros(count, 0, dtype=torch.long) if ids is None else torch.tensor(ids)
    top = torch.zeros(count, 0) if top is None else torch.tensor(top)
    rollout = make_rollout([3], [4] * count, **fields)
    rollout.rows[0].teacher_logprobs = teacher_logprobs.to_text(
        TeacherLogprobs(torch.tensor(theirs), ids, top)
    )
    return rollout


def test_text_form_keeps_every_number():
    told = TeacherLogprobs(
        torch.tensor([-0.5, math.nan]),
        torch.tensor([[7, 3], [-1, -1]]),
        torch.tensor([[-0.25, -2.0], [-math.inf, -math.inf]]),
    )
    back = teacher_logprobs.of_text(teacher_logprobs.to_text(told))
    for mine, theirs in zip(back, told, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(DataError, match="a teacher's logprobs '2:AAA' are damaged"):
        teacher_logprobs.of_text("2:AAA")
    with pytest.raises(DataError, match="a part of a token is missing"):
        teacher_logprobs.of_text("2:AAAA")


def test_columns_of_rows_with_and_without_a_teacher(make_rollout):
    one = taught(make_rollout, [-0.5, -1.5], [[7], [8]], [[-0.1], [-0.2]])
    two = taught(make_rollout, [-2.0], [[5, 6]], [[-0.3, -0.4]])
    tokens = pack_rollouts([one, make_rollout([3], [4]), two])["tokens"]
    expected = [math.nan, -0.5, -1.5, math.nan, math.nan, math.nan, -2.0]
    assert tokens["teacher_logprobs"].tolist() == pytest.approx(expected, nan_ok=True)
    ids = [[-1, -1], [7, -1], [8, -1], [-1, -1], [-1, -1], [-1, -1], [5, 6]]
    assert tokens["teacher_ids"].tolist() == ids
    one.rows[0].append_written([9], [-1.0], [0])
    with pytest.raises(DataError, match="logprobs of 2 tokens are in a row of 3"):
        pack_rollouts([one])


def test_each_token_gets_its_own_difference(make_rollout):
    """The teacher's term is added to GRPO's, whose two rewards give ±1 / sqrt(2)."""
    one = taught(
        make_rollout, [-0.5, math.nan, -60.0], reward=1.0, loss_mask=[True, False, True],
        logprobs=[-2.0, 0.0, -1.0],
    )  # fmt: skip
    two = make_rollout([3], [4], sample_index=1)
    given = taught(make_rollout, [-0.5], group_id="e", demonstration=True)
    batch = pack_rollouts([one, two, given])
    alone = Distillation(coef=2.0)(batch.copy())["tokens", "advantages"].tolist()
    assert alone == pytest.approx([0, 2 * 1.5, 0, 2 * -20.0, 0, 0, 0, 0])
    both = Distillation(coef=2.0, base_advantage=GRPO())(batch)["tokens", "advantages"].tolist()
    half = 1 / math.sqrt(2)
    assert both == pytest.approx([0, half + 3, 0, half - 40, 0, -half, 0, 0], rel=1e-5)
    assert Distillation().min_group_size == 1
    assert Distillation(base_advantage=GRPO()).min_group_size == 2
    # Rollouts that no teacher has looked at have no term.
    plain = Distillation()(pack_rollouts([two]))["tokens", "advantages"]
    assert plain.tolist() == [0, 0]


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergences_are_those_of_torch(beta):
    """TRL's GKDTrainer computes them so: torch's kl_div(x, y) is KL(y || x)."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(2, 5, 9, generator=generator, dtype=torch.double)
    teacher, student = (3 * draws).log_softmax(-1)
    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    pairs = {0.0: [(1.0, student, teacher)], 1.0: [(1.0, teacher, student)]}
    usual = [(beta, mixed, teacher), (1 - beta, mixed, student)]
    expected = sum(
        weight * kl_div(x, y, reduction="none", log_target=True).sum(-1)
        for weight, x, y in pairs.get(beta, usual)
    )
    found = generalized_jsd(teacher, student, beta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    # Fewer outcomes have less, never more (data processing); all have the same.
    few, order = teacher.topk(3)
    less = generalized_jsd(with_rest(few), with_rest(student.gather(-1, order)), beta)
    assert (less <= found + 1e-12).all()
    assert (less > 0).all()
    whole, order = teacher.topk(9)
    same = generalized_jsd(with_rest(whole), with_rest(student.gather(-1, order)), beta)
    torch.testing.assert_close(same, found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0.4, 0.1, 1e-3, 1e-5])
def test_the_share_of_all_others_is_exact_in_float32(share):
    """One token has nearly all, and two have a share each: 1 - sum is off by 6e-8 / share."""
    for weights in ([1 - 2 * share, share], [share, 1 - 2 * share], [share, share]):
        single = torch.tensor([weights]).log().requires_grad_()
        double = single.detach().double().requires_grad_()
        found, expected = (with_rest(some)[:, -1] for some in (single, double))
        # In float64, 1 - sum is exact to 1e-16.
        torch.testing.assert_close(expected, (1 - double.exp().sum(-1)).log(), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(single.grad.double(), double.grad, rtol=2e-6, atol=0)


@pytest.mark.parametrize("sure", [[0.0, -50.0], [1e-7, -50.0], [-1e-9, -30.0]])
def test_a_share_that_rounds_to_nothing_is_small_and_finite(sure):
    logprobs = torch.tensor([sure]).requires_grad_()
    rest = with_rest(logprobs)[0, -1]
    rest.backward()
    assert 0.9e-6 < float(rest.exp()) < 1e-6
    assert logprobs.grad.isfinite().all()


def test_the_loss_by_hand():
    """Teacher (1/2, 1/4, rest 1/4) and student (1/4, 1/4, rest 1/2) give 1/4 ln 2."""
    tokens = TensorDict(
        {
            "old_logprobs": torch.zeros(2),
            "advantages": torch.ones(2),
            "teacher_ids": torch.tensor([[5, 6], [-1, -1]]),
            "teacher_top": torch.tensor([[0.5, 0.25], [0.0, 0.0]]).log(),
            "likeliest_logprobs": torch.tensor([[0.25, 0.25], [0.0, 0.0]]).log(),
        },
        batch_size=[2],
    )
    logprobs = torch.zeros(2, requires_grad=True)
    loss, metrics = TeacherDivergence(beta=0.0, coef=3.0)(logprobs, tokens)
    expected = 0.25 * math.log(2)
    assert loss.tolist() == pytest.approx([3 * expected, 0.0])
    assert metrics["teacher_divergence"].tolist() == pytest.approx([expected, 0.0])
    loss, _ = TeacherDivergence(beta=0.0, base_loss=PPOClip())(logprobs, tokens)
    assert loss.tolist() == pytest.approx([expected - 1.0, -1.0])
    loss, _ = TeacherDivergence(beta=1.0)(logprobs, tokens)  # 1/4 ln 1/2 + 1/2 ln 2
    assert loss.tolist() == pytest.approx([0.25 * math.log(2), 0.0])
    with pytest.raises(ConfigError, match=r"must be model\.loss itself"):
        TeacherDivergence()(logprobs, tokens.exclude("likeliest_logprobs"))
    with pytest.raises(ConfigError, match="beta=2"):
        TeacherDivergence(beta=2)


class Noting(Reinforce):
    """The loss -A log p, which notes what it saw."""

    def __init__(self):
        object.__setattr__(self, "seen", [])

    def __call__(self, logprobs, tokens):
        self.seen.append((logprobs.detach(), tokens.clone()))
        return super().__call__(logprobs, tokens)


@pytest.mark.parametrize("base_advantage", [None, GRPO()])
def test_the_term_is_of_the_policy_in_each_pass(tiny_model, make_rollout, train_on, base_advantage):
    """Other weights wrote the tokens: -2 each, far from what the policy says."""
    rollouts = [
        taught(
            make_rollout, [-0.5, math.nan], reward=float(i), sample_index=i, logprobs=[-2.0, -2.0]
        )
        for i in range(2)
    ]
    given = taught(make_rollout, [-0.5], group_id="e", demonstration=True)
    loss = Noting()
    module = PolicyModule(
        str(tiny_model), advantage=Distillation(3.0, base_advantage), loss=loss,
        optimizer=sgd, update={"ppo_epochs": 2, "max_grad_norm": None},
    )  # fmt: skip
    train_on(module, [pack_rollouts([*rollouts, given])])
    (before, tokens), (after, later) = loss.seen
    assert (before - after).abs().max() > 1e-2
    half = 0.0 if base_advantage is None else 1 / math.sqrt(2)
    for logprobs, seen in ((before, tokens), (after, later)):
        one, other = (3 * (-0.5 - p) for p in logprobs[[0, 2]].tolist())
        expected = [one - half, -half, other + half, half, 0.0]
        assert seen["advantages"].tolist() == pytest.approx(expected, abs=1e-4)


def test_likeliest_tokens_that_the_policy_lacks_are_among_all_others(tiny_model, make_rollout):
    """The teacher has 20 tokens, and the policy 16."""
    losses = []
    for ids in ([[6, 19]], [[6, -1]]):
        module = PolicyModule(str(tiny_model), loss=TeacherDivergence(beta=0.3))
        module.configure_model()
        policy = module.policy
        policy.follows_teacher = True
        batch = pack_rollouts([taught(make_rollout, [-1.0], ids, [[-0.5, -1.5]])])
        scores = policy(batch)
        loss, _ = module.objective(scores, loss_tokens(batch, scores), iteration=0)
        losses.append(float(loss))
    assert losses[0] == losses[1] > 1e-3


def test_the_gradient_is_that_of_all_logits(tiny_model, make_rollout, in_double):
    rollouts = [make_rollout([3], [4, 5], group_id=str(i)) for i in range(2)]
    ids = torch.tensor([[6, 7], [8, 9]])
    top = torch.tensor([[0.6, 0.3], [0.2, 0.1]]).float().log()
    for rollout in rollouts:
        told = TeacherLogprobs(torch.tensor([-1.0, -1.0]), ids, top)
        rollout.rows[0].teacher_logprobs = teacher_logprobs.to_text(told)
    module = PolicyModule(str(tiny_model), loss=TeacherDivergence(beta=0.0))
    module.configure_model()
    policy = module.policy.double()
    batch = pack_rollouts(rollouts)
    scores = policy(batch)
    loss, metrics = module.objective(scores, loss_tokens(batch, scores), iteration=0)
    loss.mean().backward()
    # The reference: all logits of the same weights, in float64 as well.
    lm = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    logits = lm(input_ids=torch.tensor([[3, 4]])).logits[0].log_softmax(-1)
    apart = generalized_jsd(with_rest(top.double()), with_rest(logits.gather(-1, ids)), 0.0)
    apart.mean().backward()
    assert metrics["policy/teacher_divergence"].tolist() == pytest.approx(apart.tolist() * 2)
    size = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
    assert size > 1e-2
    for name, weight in lm.named_parameters():
        gap = policy.lm.get_parameter(name).grad - weight.grad
        assert gap.norm() < 1e-9 * size, name


@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_tokens": 1},
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_distributions_that_are_not_the_models_are_refused(
    tiny_model, make_rollout, train_on, setting
):
    first = next(iter(setting))
    rollout = taught(make_rollout, [-1.0], [[6]], [[-0.5]], **setting)
    module = PolicyModule(str(tiny_model), advantage=Distillation(), loss=TeacherDivergence())
    with pytest.raises(ConfigError, match=rf"compares whole distributions.*{first}: [01]"):
        train_on(module, [pack_rollouts([rollout])])


def test_wrapped_losses_are_refused(tiny_model, make_rollout, train_on):
    rollout = taught(make_rollout, [-1.0], [[6]], [[-0.5]])
    wrapped = SFTMix(TeacherDivergence())
    module = PolicyModule(str(tiny_model), advantage=Distillation(), loss=wrapped)
    with pytest.raises(ConfigError, match=r"must be model\.loss itself"):
        train_on(module, [pack_rollouts([rollout])])
