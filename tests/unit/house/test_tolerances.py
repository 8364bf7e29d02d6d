"""The bounds of tests/support/tolerances.py: wide enough for any order of adding, no faults."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.algos.advantages import GRPO
from lightning_rl.algos.objective import SequenceMean
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import split_micro_batches
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.policy import Policy
from tests.support.tolerances import (
    distance,
    gradient_rounding,
    norm_rounding,
    rounding,
    scores_rounding,
)


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    policy = Policy(str(tiny_model), SharedValueHead())
    generator = torch.Generator().manual_seed(0)
    policy.value_head.linear.weight.data.normal_(std=0.1, generator=generator)
    return policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [10, 1_000])
def test_sums_in_any_order_are_within_the_bound(dtype, count):
    generator = torch.Generator().manual_seed(count)
    terms = torch.randn(200, count, generator=generator).to(dtype)
    exact = terms.double().sum(1)
    straight = torch.zeros(200, dtype=dtype)
    for column in terms.unbind(1):  # one after another, as in the worst order
        straight = straight + column
    # Partial sums grow as a random walk, to a few times sqrt(count): they are what is rounded.
    magnitude = float(terms.double().cumsum(1).abs().max())
    for sums in (straight, terms.flip(1).cumsum(1)[:, -1], terms.sum(1)):
        assert float((sums.double() - exact).abs().max()) < rounding(count, magnitude, dtype)
        assert distance(sums, exact) < norm_rounding(count, dtype)
    # A term left out is not rounding.
    gap = float((terms[:, 1:].double().sum(1) - exact).abs().max())
    assert gap > rounding(count, magnitude, torch.float32)


def scores(policy, rollouts):
    with torch.no_grad():
        return policy(pack_rollouts(rollouts))


FAULTS = {
    "another temperature": lambda r: setattr(
        r.sampling, "temperature", r.sampling.temperature * 1.001
    ),
    "top-p of another rollout": lambda r: setattr(r.sampling, "top_p", 0.95),
    "top-k of another rollout": lambda r: setattr(r.sampling, "top_k", 8),
    "a prompt without its first token": lambda r: r.prompt.token_ids.__delitem__(0),
    "another token in the prompt": lambda r: r.prompt.token_ids.__setitem__(0, 13),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_scoring_are_beyond_it(policy, random_rollouts, fault):
    rollouts = random_rollouts(12, groups=5)
    right = scores(policy, rollouts)
    bound = scores_rounding(policy.lm.config, right.logprobs)
    prompts = {id(r.prompt.token_ids): r for r in rollouts}
    for rollout in prompts.values():  # those of a group share their prompt's tokens
        FAULTS[fault](rollout)
    wrong = scores(policy, rollouts)
    assert float((wrong.logprobs - right.logprobs).abs().max()) > 5 * bound


def test_so_are_a_shift_a_mask_and_what_another_rollout_sees(tiny_model, policy, random_rollouts):
    rollouts = random_rollouts(12, groups=5)
    right = scores(policy, rollouts).logprobs
    bound = scores_rounding(policy.lm.config, right)
    assert float((right.roll(1) - right).abs().max()) > 1000 * bound
    for rollout in rollouts:  # the mask of a token is its neighbour's
        [row] = rollout.rows
        row.loss_mask = row.loss_mask[1:] + row.loss_mask[:1]
    shifted = scores(policy, rollouts).logprobs
    assert len(shifted) == len(right)
    assert float((shifted - right).abs().max()) > 1000 * bound
    first, second = (rollouts[i].prompt.token_ids + rollouts[i].token_ids for i in (0, 4))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        seen = plain(input_ids=torch.tensor([first + second])).logits[0, len(first) :]
        alone = plain(input_ids=torch.tensor([second])).logits[0]
    assert float((seen - alone).abs().max()) > 1000 * scores_rounding(tiny_model, alone)


def test_so_is_the_precision_of_sixteen_bits(tiny_model, random_rollouts):
    rollouts = random_rollouts(12, groups=5)
    right = scores(Policy(str(tiny_model)), rollouts)
    coarse = Policy(str(tiny_model))
    for parameter in coarse.parameters():
        parameter.data = parameter.data.bfloat16().float()
    bound = scores_rounding(coarse.lm.config, right.logprobs)
    assert float((scores(coarse, rollouts).logprobs - right.logprobs).abs().max()) > 20 * bound


def gradient(policy, batch, weights, budget: int):
    """Return the gradient of -w A log p, micro-batch by micro-batch; ``weights`` gives those of a
    micro-batch."""
    policy.zero_grad()
    for rows in split_micro_batches(batch, budget):
        micro_batch = select(batch, rows)
        part = policy(micro_batch)
        factor = (weights(micro_batch) * micro_batch["tokens", "advantages"])[part.live]
        (-factor * part.logprobs).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.lm.parameters()])


def test_faults_in_a_gradient_are_beyond_its_bound(policy, random_rollouts):
    rollouts = random_rollouts(62, groups=5)
    batch = GRPO(False)(pack_rollouts(rollouts))
    batch["tokens", "loss_weights"] = SequenceMean()(batch)
    bound = gradient_rounding(policy.lm.config, len(batch["tokens"]))
    kept = lambda micro_batch: micro_batch["tokens", "loss_weights"]  # noqa: E731
    right = gradient(policy, batch, kept, 100_000)
    assert distance(gradient(policy, batch, kept, 20), right) < bound
    faults = {
        "averaged per micro-batch": lambda: gradient(policy, batch, SequenceMean(), 60),
        "a micro-batch forgotten": lambda: gradient(
            policy, select(batch, torch.arange(14)), kept, 60
        ),
        "one token 1 % too heavy": lambda: gradient(policy, heavier(batch), kept, 60),
    }
    for name, fault in faults.items():
        assert distance(fault(), right) > 10 * bound, name


def heavier(batch):
    batch = batch.clone()
    live = (batch["tokens", "loss_mask"] & (batch["tokens", "advantages"] != 0)).nonzero()
    batch["tokens", "loss_weights"][live[0]] *= 1.01
    return batch
