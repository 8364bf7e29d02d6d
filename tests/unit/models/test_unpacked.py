"""Test models that cannot be packed: each rollout in a line, as by the model's own forward."""

import dataclasses

import pytest
import torch
import transformers as hf

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import PADDED, split_micro_batches
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.packed import build_layout, of_all_tokens
from lightning_rl.models.attention.unpacked import lines_of
from lightning_rl.models.heads import SeparateValueHead
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import FrozenReference
from tests.support.architectures import GROUPED, UNPACKED, own_scores, saved
from tests.support.doubles import EXACT, doubled, in_double as in_double
from tests.support.families import ARCHITECTURES

SAME = 1e4 * EXACT
"""Chunked recurrences take exponentials of sums, and differences of them, on the way."""


@pytest.mark.parametrize("name", UNPACKED)
def test_scores_and_gradients_are_those_of_the_models_own_forward(
    name, tmp_path, random_rollouts, in_double
):
    directory = saved(UNPACKED[name](), tmp_path)
    with pytest.warns(UserWarning, match="cannot compute packed rows, so it runs unpacked"):
        policy = Policy(directory).double()
    plain = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).double()
    rollouts = random_rollouts(0, temperature=1.0)
    scores = policy(doubled(pack_rollouts(rollouts)))
    expected = own_scores(plain, rollouts)
    torch.testing.assert_close(scores.logprobs, expected, rtol=SAME, atol=SAME)
    scores.logprobs.square().sum().backward()
    expected.square().sum().backward()
    theirs = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    size = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for parameter_name, gradient in theirs.items():
        gap = (policy.lm.get_parameter(parameter_name).grad - gradient).norm()
        assert gap <= SAME * size, parameter_name


def test_lines_by_hand(make_rollout):
    """Prompts [3, 4, 5] and [6]; in the row they come first, then completions less their last."""
    rollouts = [
        make_rollout([3, 4, 5], [7, 8, 9]),
        make_rollout([3, 4, 5], [7]),  # computes no token of its own, so it has no line
        make_rollout([6], [10, 11]),
        make_rollout([3, 4, 5], [12, 13]),
    ]
    layout = build_layout(pack_rollouts(rollouts))
    assert layout.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 10, 12]
    lines = lines_of(layout.segments)
    ids = layout.input_ids[lines.source]
    assert ids.tolist() == [[3, 4, 5, 7, 8], [6, 10, 6, 6, 6], [3, 4, 5, 12, 3]]
    assert ids.flatten()[lines.place].tolist() == layout.input_ids.tolist()
    # The shared prompt's states are those of the first line.
    assert lines.place.tolist() == [0, 1, 2, 5, 3, 4, 6, 13]


def test_micro_batches_of_lines_are_counted_with_their_padding(make_rollout):
    """Lengths 10, 9, 8 and 4 would be 40 tokens as four lines, nine of them padding, of 31."""
    batch = pack_rollouts([make_rollout([3], [4] * n) for n in (3, 9, 7, 8)])
    assert forward_tokens(batch, PADDED) == 40
    micro_batches = [
        rows.tolist() for rows in split_micro_batches(batch, 30, even=False, filling=PADDED)
    ]
    assert micro_batches == [[1, 2, 3], [0]]
    # 40 / 31 is less than 1.3, so the budget alone may part them.
    assert len(split_micro_batches(batch, 40, filling=PADDED)) == 1
    # With another of length 4 it is 50 / 35, which parts them whatever the budget is.
    batch = pack_rollouts([make_rollout([3], [4] * n) for n in (3, 9, 7, 8, 3)])
    assert len(split_micro_batches(batch, 1000, filling=PADDED)) == 2
    # A shared prompt counts for each.
    batch = pack_rollouts([make_rollout([3] * 8, [4, 5])] * 3)
    assert [len(rows) for rows in split_micro_batches(batch, 20, filling=PADDED)] == [2, 1]


def test_scoring_in_several_micro_batches_and_a_reference_give_the_same(
    tmp_path, random_rollouts, in_double
):
    policy = Policy(saved(UNPACKED["lfm2"](), tmp_path)).double()
    reference = FrozenReference()
    reference.configure(policy)
    batch = doubled(pack_rollouts(random_rollouts(1)))
    few, many = (
        policy.score(batch.copy(), "again", budget)["tokens", "again"] for budget in (10_000, 30)
    )
    torch.testing.assert_close(few, many, rtol=SAME, atol=SAME)
    copied = reference.policy.score(batch.copy(), "again", 30)["tokens", "again"]
    assert torch.equal(copied, many)


def test_routers_are_heard_and_told_in_the_order_of_the_micro_batch(tmp_path, random_rollouts):
    config = UNPACKED["qwen3_next"]()
    config.mlp_only_layers = []
    policy = Policy(saved(config, tmp_path))
    batch = pack_rollouts(random_rollouts(3))
    with torch.no_grad():
        first = policy(batch)
    layout = build_layout(batch)
    assert first.router_outputs.experts.shape == (len(layout.input_ids), 2, 2)
    # Each expert's place changes; then only what is replayed says where tokens go.
    spread = of_all_tokens(batch, first.router_outputs.experts)
    other = torch.where(spread >= 0, (spread + 1) % 4, spread)
    batch["tokens", "routed_experts"] = other
    policy.replays = True
    with torch.no_grad():
        replayed = policy(batch)
    assert torch.equal(of_all_tokens(batch, replayed.router_outputs.experts), other)
    assert not torch.allclose(replayed.logprobs, first.logprobs)


def test_a_critic_has_a_pass_of_its_own(tmp_path, random_rollouts):
    """A packed policy's critic may be one that cannot be packed; micro-batches are then counted for
    it."""
    critic = saved(UNPACKED["lfm2"](), tmp_path / "critic")
    policy = Policy(
        saved(hf.Qwen3Config(**GROUPED, head_dim=8), tmp_path / "policy"), SeparateValueHead(critic)
    )
    assert policy.body_pass.packed
    assert not policy.critic_pass.packed
    assert policy.filling is PADDED
    batch = pack_rollouts(random_rollouts(2))
    torch.nn.init.normal_(policy.value_head.linear.weight)
    values, layout = policy(batch).values, build_layout(batch)
    body = hf.AutoModel.from_pretrained(critic)
    rollouts, expected = random_rollouts(2), []
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
        states = body(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = states[len(rollout.prompt.token_ids) - 1 : -1][torch.tensor(rollout.loss_mask)]
        expected.append(policy.value_head.linear(own).squeeze(-1))
    assert len(values) == len(layout.live)
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_what_goes_with_micro_batches_only_is_refused(tmp_path):
    directory = saved(UNPACKED["lfm2"](), tmp_path)
    with pytest.raises(ConfigError, match=r"compile_layers=True: Lfm2.* set compile_layers: False"):
        Policy(directory, compile_layers=True)
    policy = Policy(directory)
    with pytest.raises(ConfigError, match=r"sequence=2: Lfm2ForCausalLM.* set sequence: 1"):
        policy.share_micro_batches(2)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2", "stablelm", "falcon"])
def test_without_weights_the_pass_is_told_by_the_layers(name, tmp_path):
    """Ranks that are given rank 0's weights have none, nor has `lightning-rl check`."""
    directory = saved(UNPACKED[name](), tmp_path)
    with torch.device("meta"):
        known = Policy(directory).body_pass
    # Whether layers hand arguments on is found out only where they compute.
    assert known.packed == (name == "stablelm")


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "jamba"])
def test_a_micro_batch_that_leaks_is_found_where_weights_are_small(name, tmp_path):
    """Scores at transformers' own init of 0.02 are off by about 1e-3 nats or less."""
    one = ARCHITECTURES[name]
    small = dataclasses.replace(one, sizes=one.sizes | {"initializer_range": 0.02})
    assert not Policy(str(small.save(tmp_path / "model"))).body_pass.packed
