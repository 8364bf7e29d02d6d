"""Test aggregation: weights by hand, losses in float64, gradients however a minibatch is cut."""

from collections import defaultdict
from statistics import fmean

import pytest
import torch
from torch import Tensor

from lightning_rl.algos.advantages import GRPO
from lightning_rl.algos.objective import PromptMean, SequenceMean, TokenMean, TokenSum
from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from tests.support.tolerances import distance, gradient_rounding, rounding

RULES = [TokenMean(), SequenceMean(), PromptMean(), TokenSum(max_tokens=12)]


def three(make_rollout):
    """Micro-batch model tokens: 1 (of 2) and 3 in group a, 2 in group b."""
    return pack_rollouts(
        [
            make_rollout([3], [4, 5], loss_mask=[True, False], group_id="a"),
            make_rollout([3], [4, 5, 1], group_id="a"),
            make_rollout([6], [4, 1], group_id="b"),
        ]
    )


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (TokenMean(), [1 / 6, 1 / 6, 1 / 6]),
        (SequenceMean(), [1 / 3, 1 / 9, 1 / 6]),
        (PromptMean(), [1 / 8, 1 / 8, 1 / 4]),
        # divided by 3 rollouts x 10 tokens, whatever their own lengths
        (TokenSum(max_tokens=10), [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_by_hand(make_rollout, rule, weights):
    a, b, c = weights
    assert rule(three(make_rollout)).tolist() == pytest.approx([0, a, 0, 0, b, b, b, 0, c, c])


def reference(rule, losses: list[list[float]], groups: list[int]) -> float:
    """Return the mean of per-token losses, given per rollout, as each rule defines it."""
    if isinstance(rule, TokenMean):
        return fmean(loss for rollout in losses for loss in rollout)
    if isinstance(rule, SequenceMean):
        return fmean(fmean(rollout) for rollout in losses)
    if isinstance(rule, PromptMean):
        by_group = defaultdict(list)
        for group, rollout in zip(groups, losses, strict=True):
            by_group[group] += rollout
        return fmean(fmean(group) for group in by_group.values())
    return fmean(sum(rollout) / rule.max_tokens for rollout in losses)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_parity_in_float64(random_batch, rule, seed):
    batch = random_batch(60 + seed, groups=5)
    mask, row = batch["tokens", "loss_mask"], token_rows(batch)
    generator = torch.Generator().manual_seed(seed)
    token_loss = torch.randn(len(row), generator=generator, dtype=torch.double)
    losses = [token_loss[mask & (row == r)].tolist() for r in range(len(batch["rollouts"]))]
    expected = reference(rule, losses, batch["rollouts", "group"].tolist())
    assert float((rule(batch) * token_loss).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert torch.equal(rule(batch) > 0, mask)


@pytest.mark.parametrize("rule", [TokenMean(), SequenceMean(), PromptMean()])
def test_the_means_sum_to_one(random_batch, rule):
    weights = rule(random_batch(61))
    assert float(weights.sum()) == pytest.approx(1, abs=rounding(len(weights)))


def test_the_divisor_of_token_sum_ignores_lengths(make_rollout):
    short = pack_rollouts([make_rollout([3], [1]), make_rollout([3], [4, 1])])
    long = pack_rollouts([make_rollout([3], [4] * 20), make_rollout([3], [4] * 30)])
    for batch in (short, long):
        weights = TokenSum(max_tokens=8)(batch)[batch["tokens", "loss_mask"]]
        assert weights.tolist() == pytest.approx([1 / 16] * len(weights))


@pytest.mark.parametrize("rule", RULES)
def test_a_rollout_without_model_tokens(make_rollout, rule):
    rollouts = [
        make_rollout([3], [4, 5], loss_mask=[False, False], group_id="a"),
        make_rollout([3], [1], group_id="b"),
    ]
    # It has no mean to take part in; for the sum it is a rollout like any other.
    expected = 1 / 24 if isinstance(rule, TokenSum) else 1
    if isinstance(rule, PromptMean):
        expected = 1  # nor has its prompt
    assert rule(pack_rollouts(rollouts)).tolist() == pytest.approx([0, 0, 0, 0, expected])


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_train_on_weighs_nothing(make_rollout, rule):
    weights = rule(pack_rollouts([make_rollout([3], [4, 5], loss_mask=[False, False])]))
    assert weights.tolist() == [0, 0, 0]


def test_no_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"TokenSum\(max_tokens=0\) must be >= 1"):
        TokenSum(max_tokens=0)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_do_not_depend_on_micro_batches_or_order(
    tiny_model, train_on, random_rollouts, rule
):
    rollouts = random_rollouts(62, groups=5)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = [rollouts[i] for i in order]

    def gradient(arranged, budget: int) -> Tensor:
        module = PolicyModule(
            str(tiny_model), aggregation=rule, advantage=GRPO(False),
            update={"max_grad_norm": None, "max_tokens_per_micro_batch": budget},
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )  # fmt: skip
        train_on(module, [pack_rollouts(arranged)])
        return torch.cat([p.grad.flatten() for p in module.policy.parameters()])

    first = gradient(rollouts, 100_000)
    assert float(first.norm()) > 1e-3
    for arranged, budget in ((rollouts, 1), (shuffled, 40)):
        bound = gradient_rounding(tiny_model, tokens=sum(len(r.token_ids) for r in rollouts))
        assert distance(gradient(arranged, budget), first) < bound, budget


def test_gradients_of_the_rules_differ_as_their_weights_do(make_rollout):
    """The test above can therefore not pass by ignoring the rule."""
    weights = [rule(three(make_rollout)) for rule in RULES]
    for i, one in enumerate(weights):
        for other in weights[i + 1 :]:
            assert not torch.allclose(one, other)
