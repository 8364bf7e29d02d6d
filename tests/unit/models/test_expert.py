"""Test which experts ranks share, and which they cannot, and gradients of several meshes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.learn.gradients import clip_gradients, norm_of, scale_gradients
from lightning_rl.models.heads import SeparateValueHead
from lightning_rl.models.parallel.expert import experts_of, require_experts, spread
from lightning_rl.models.parallel.sharding import shared_dim
from lightning_rl.models.parallel.tensor import TensorRanks
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout, Row
from tests.support.mixtures import KINDS, SIGMOIDS, saved_mixture
from tests.support.tolerances import distance, gradient_rounding, scores_rounding


@pytest.fixture(scope="module", params=[*KINDS, *SIGMOIDS])
def mixture(request, tmp_path_factory):
    return saved_mixture(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return saved_mixture("qwen3_moe", tmp_path_factory.mktemp("qwen"))


def test_one_of_two_has_half_of_the_experts_of_policy_and_critic(qwen):
    policy = Policy(str(qwen), SeparateValueHead(str(qwen)))
    before = {name: tuple(p.shape) for name, p in policy.named_parameters()}
    assert len(spread(policy, TensorRanks(None, 2))) == 4
    for name, parameter in policy.named_parameters():
        count, *rest = before[name]
        expected = (count // 2, *rest) if ".experts." in name else before[name]
        assert tuple(parameter.shape) == expected


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm", "eager"])
def test_tokens_that_travel_nowhere_get_the_same(mixture, way):
    """One rank of one: all that is done on a way, and its experts have all tokens."""
    row = Row([2, 4], [3, 5, 6, 7, 8], [True] * 5, [0.0] * 5, [0] * 5)
    micro_batch = pack_rollouts([Rollout(Prompt("0", "", [2, 4]), "0", 0, seed=0, rows=[row])])

    def scored(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy.lm.set_experts_implementation(way)
        logprobs = policy(micro_batch).logprobs
        logprobs.sum().backward()
        return logprobs.detach(), {name: p.grad for name, p in policy.named_parameters()}

    policy = Policy(str(mixture))
    expected, gradients = scored(policy)
    policy.zero_grad()
    spread(policy, TensorRanks(None, 1))
    found, others = scored(policy)
    bound = scores_rounding(policy.lm.config, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    assert gradients.keys() == others.keys()
    bound = gradient_rounding(policy.lm.config, len(expected))
    for name, gradient in gradients.items():
        assert distance(others[name], gradient) < bound, name


def test_biases_are_shared_as_well():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    config.pad_token_id = 0
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    [experts] = spread(lm, TensorRanks(None, 2))
    assert {len(p) for p in experts.parameters()} == {2}
    assert {name for name, _ in experts.named_parameters()} > {"down_proj", "down_proj_bias"}


@pytest.mark.parametrize("change", ["none", "sees", "compiled"])
def test_models_whose_tokens_cannot_travel(qwen, change):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    lm = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
    message = "expert=2: LlamaForCausalLM has no experts .* set expert: 1"
    assert experts_of(lm) == []
    if change != "none":
        lm = Policy(str(qwen), compile_layers=change == "compiled").lm
        message = "expert=2: compile is not tested"
    if change == "sees":
        lm.config.vision_config = SimpleNamespace()
        message = "expert=2: a model that sees pictures"
    with pytest.raises(ConfigError, match=message):
        require_experts(lm, 2)


def test_a_number_that_does_not_divide_is_named(qwen):
    with pytest.raises(ConfigError, match="expert=3 does not divide the 8 experts of a layer"):
        spread(Policy(str(qwen)), TensorRanks(None, 3))


def test_ranks_with_the_same_experts_share_whole_ones_or_rows():
    def dim(ranks: int) -> int:
        same = SimpleNamespace(size=lambda: ranks)
        return shared_dim(same, nn.Parameter(torch.zeros(4, 6, 5))).dim

    assert [dim(ranks) for ranks in (1, 2, 3, 4, 6)] == [0, 0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"8 processes have the same 4 experts, .* their 6 rows"):
        dim(8)


def test_gradients_are_clipped_as_torch_does():
    """The gradients of several meshes are tested by tests/integration/test_layouts.py."""
    parameters = [nn.Parameter(torch.ones(*shape).double()) for shape in ((3,), (2, 2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    without = nn.Parameter(torch.ones(1).double())
    assert float(norm_of([p.grad for p in parameters])) == pytest.approx(7**0.5 * 2)
    assert float(clip_gradients([*parameters, without], 100.0)) == pytest.approx(7**0.5 * 2)
    assert bool((parameters[0].grad == 2).all())
    assert float(clip_gradients(parameters, 1.0)) == pytest.approx(7**0.5 * 2)
    assert float(norm_of([p.grad for p in parameters])) == pytest.approx(1.0)
    scale_gradients([p.grad for p in parameters], torch.tensor(3.0))
    assert float(norm_of([p.grad for p in parameters])) == pytest.approx(3.0)
    assert float(norm_of([])) == 0.0
