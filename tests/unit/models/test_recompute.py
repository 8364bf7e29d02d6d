"""Test recomputed layers: the same gradients, whatever they keep and wherever."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl import LoRA, PolicyModule, Recompute
from lightning_rl.cli.check.batches import largest_rollouts
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.models.input_offloading import HostInput
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import FUSED_ATTENTION, TiledMLP, layers_of, tiled_mlps
from lightning_rl.rollout import Prompt
from tests.support.followed import kept_for_backward
from tests.support.grouped import grouped
from tests.support.mixtures import saved_mixture
from tests.support.tolerances import scores_rounding

LIKE_TRUE = (
    True,
    Recompute(every=2),
    Recompute(inputs="host"),
    Recompute(keep="attention"),
    Recompute(keep="attention", inputs="host", every=2),
)


@pytest.fixture(scope="module")
def micro_batch():
    """Micro-batch two groups of four that share prompts, with keys enough for fused attention."""
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(2)]
    return pack_rollouts(largest_rollouts(prompts, 2, 4, 80))


def gradients(model, micro_batch, dtype=torch.float32, **options) -> dict[str, Tensor]:
    policy = Policy(str(model), **grouped(**options)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:  # one of the two factors starts at zero
            parameter.data.normal_(std=0.1, generator=generator)
    scores = policy(micro_batch)
    (scores.logprobs.sum() + scores.entropy.square().sum()).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_whatever_is_kept_wherever_gradients_are_the_same_bits(tiny_model, micro_batch, lora):
    expected = gradients(tiny_model, micro_batch, lora=lora)
    assert all(grad.any() for grad in expected.values())
    for recompute in LIKE_TRUE:
        found = gradients(tiny_model, micro_batch, lora=lora, gradient_checkpointing=recompute)
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            assert torch.equal(grad, expected[name]), (recompute, name)


def test_mlps_in_tiles_have_the_same_gradients_but_for_rounding(tiny_model, micro_batch):
    expected = gradients(tiny_model, micro_batch, torch.float64)
    tiles = Recompute(mlp_tokens=100)
    found = gradients(tiny_model, micro_batch, torch.float64, gradient_checkpointing=tiles)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def test_a_tile_at_a_time_is_computed(tiny_model, micro_batch):
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": Recompute(mlp_tokens=100)})
    seen = []
    mlp = tiled_mlps(policy)[-1]
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))
    policy(micro_batch).logprobs.sum().backward()
    # No rollout's last token is computed.
    whole, rest = divmod(forward_tokens(micro_batch) - 8, 100)
    tiles = [100] * whole + [rest]
    # In forward, where the layer is computed again, and in backward, the last first.
    assert seen[: len(tiles)] == tiles
    assert seen[-len(tiles) :] == tiles[::-1]
    assert max(seen) == 100


def test_inputs_leave_the_device_and_come_back_one_ahead(tiny_model, micro_batch):
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": Recompute(inputs="host")})
    inputs: list[weakref.ref] = []
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
        for layer in layers_of(policy)
    ]
    scores = policy(micro_batch)
    # The last may still be on its way; all others are gone.
    assert [one() is not None for one in inputs] == [False] * (len(handles) - 1) + [True]
    scores.logprobs.sum().backward()
    bytes_of_input = (forward_tokens(micro_batch) - 8) * 64 * 4  # of two; the last is there
    on_device, on_host = (
        kept_for_backward(
            Policy(str(tiny_model), loading={"gradient_checkpointing": kind}), micro_batch
        )
        for kind in (True, Recompute(inputs="host"))
    )
    assert on_device - on_host == bytes_of_input


def test_a_copy_is_fetched_before_it_is_needed():
    first, second, third = (torch.randn(3, 4) for _ in range(3))
    sent = [HostInput(first, None)]
    for tensor in (second, third):
        sent.append(HostInput(tensor, weakref.ref(sent[-1])))
    kept = [tensor.clone() for tensor in (first, second, third)]
    for tensor in (first, second, third):  # whoever has the memory now may write there
        tensor.zero_()
    assert [one._back is not None for one in sent] == [False, False, False]
    assert torch.equal(sent[2].received(), kept[2])
    assert [one._back is not None for one in sent] == [False, True, False]
    assert torch.equal(sent[0].received(), kept[0])  # out of turn
    assert torch.equal(sent[1].received(), kept[1])
    assert torch.equal(sent[1].received(), kept[1])  # a graph that is kept is gone through again


def test_a_graph_can_be_gone_through_twice(tiny_model, micro_batch):
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": Recompute(inputs="host")})
    loss, weight = policy(micro_batch).logprobs.sum(), policy.lm.model.layers[0].mlp.up_proj.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("every", "recomputed"), [(1, [1, 1]), (2, [1, 0]), (3, [0, 0])])
def test_some_layers_are_recomputed_but_the_last_only_with_all(tiny_model, every, recomputed):
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": Recompute(every=every)})
    assert [layer.gradient_checkpointing for layer in layers_of(policy)] == recomputed


class Attended(TorchDispatchMode):
    """Counts calls of fused attention."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() in FUSED_ATTENTION
        return func(*args, **(kwargs or {}))


def test_attention_that_is_kept_is_not_computed_again(tiny_model, micro_batch):
    for kind, again in ((True, True), (Recompute(keep="attention"), False)):
        policy = Policy(str(tiny_model), loading={"gradient_checkpointing": kind})
        with Attended() as forward:
            loss = policy(micro_batch).logprobs.sum()
        with Attended() as backward:
            loss.backward()
        assert forward.calls > 0
        assert backward.calls == (forward.calls if again else 0)


def test_mlps_of_experts_are_left_alone(tmp_path):
    mixture = str(saved_mixture("qwen3_moe", tmp_path))
    with pytest.raises(ConfigError, match=r"mlp_tokens=8: no layer of Qwen3Moe\w+ has a dense MLP"):
        Policy(mixture, loading={"gradient_checkpointing": Recompute(mlp_tokens=8)})


def test_tiles_need_no_gradient(tiny_model, micro_batch):
    plain = Policy(str(tiny_model))
    tiled = Policy(str(tiny_model), loading={"gradient_checkpointing": Recompute(mlp_tokens=100)})
    assert all(isinstance(mlp.forward, TiledMLP) for mlp in tiled_mlps(tiled))
    with torch.no_grad():
        ours, theirs = tiled(micro_batch).logprobs, plain(micro_batch).logprobs
    bound = scores_rounding(tiny_model, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def test_it_is_written_as_a_dictionary_too():
    module = PolicyModule(
        "model", loading={"gradient_checkpointing": {"inputs": "host", "every": 2}}
    )
    assert module.loading.gradient_checkpointing == Recompute(every=2, inputs="host")
    for wrong in ({"every": 0}, {"mlp_tokens": 0}):
        with pytest.raises(ConfigError, match=r"gradient_checkpointing\.\w+=0 must be >= 1"):
            PolicyModule("model", loading={"gradient_checkpointing": wrong})
    with pytest.raises(ConfigError, match="host"):
        PolicyModule("model", loading={"gradient_checkpointing": {"inputs": "disk"}})
