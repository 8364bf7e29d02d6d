"""Test what of a model ranks share, and what they cannot; the same numbers in threads."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_rl import NF4, LoRA
from lightning_rl.errors import ConfigError
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.parallel.strategy import ShardedStrategy, warn_if_experimental
from lightning_rl.models.parallel.tensor import TensorRanks, split
from lightning_rl.models.parallel.tensor_plan import require_divisible, styles_of
from lightning_rl.models.policy import Policy
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.small_run import trainer_of
from tests.support.thread_ranks import ThreadRanks, on_threads
from tests.support.tiny_models import save_random_model

SIZES = {"vocab_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("split") / "model"
    save_random_model(directory, make_tokenizer(), Qwen3Config, **SIZES)
    return directory


def lm_of(kind=LlamaConfig, device="meta", **sizes):
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(kind(**config | SIZES | sizes))


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_one_of_two_has_half_of_the_heads_the_width_and_the_vocabulary(model):
    policy = Policy(str(model), SharedValueHead(), lora=LoRA(rank=4))
    policy.split(TensorRanks(None, 2))
    found, layer = shapes(policy), "lm.model.layers.1."
    # Outputs of 4 heads of 16 to those of 2; inputs of 64 likewise; norms of one head stay.
    assert found[f"{layer}self_attn.q_proj.base_layer.weight"] == (32, 64)
    assert found[f"{layer}self_attn.k_proj.base_layer.weight"] == (16, 64)
    assert found[f"{layer}self_attn.o_proj.base_layer.weight"] == (64, 32)
    assert found[f"{layer}mlp.up_proj.base_layer.weight"] == (32, 64)
    assert found[f"{layer}mlp.down_proj.base_layer.weight"] == (64, 32)
    assert found[f"{layer}self_attn.q_norm.weight"] == (16,)
    assert found[f"{layer}input_layernorm.weight"] == (64,)
    assert found["lm.model.embed_tokens.weight"] == (8, 64)
    # B of a column-wise layer's adapter is split, and A of a row-wise one's.
    assert found[f"{layer}self_attn.q_proj.lora_A.default.weight"] == (4, 64)
    assert found[f"{layer}self_attn.q_proj.lora_B.default.weight"] == (32, 4)
    assert found[f"{layer}mlp.down_proj.lora_A.default.weight"] == (4, 32)
    assert found[f"{layer}mlp.down_proj.lora_B.default.weight"] == (64, 4)
    assert found["value_head.linear.weight"] == (1, 64)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight  # tied, as it was


def test_a_critic_of_its_own_is_split_too(model):
    policy = Policy(str(model), SeparateValueHead(str(model)))
    policy.split(TensorRanks(None, 2))
    found = shapes(policy.value_head)
    assert found["body.layers.0.mlp.gate_proj.weight"] == (32, 64)
    assert found["body.embed_tokens.weight"] == (8, 64)
    assert found["linear.weight"] == (1, 64)


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma3TextConfig])
def test_parts_of_an_embedding_are_the_whole(kind):
    """A padding token's row gets no gradient, whichever rank has it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = lm_of(kind, "cpu", vocab_size=12, pad_token_id=7).double()
        for parameter in whole.parameters():
            nn.init.normal_(parameter)
    assert whole.model.embed_tokens.padding_idx == 7
    ids = torch.tensor([[0, 5, 6, 7, 11]])
    weights = torch.linspace(1, 2, 5 * 64, dtype=torch.double).reshape(1, 5, 64)

    def embedded(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
        embedding = lm.get_input_embeddings()
        out = embedding(ids)
        (out * weights).sum().backward()
        return out.detach(), embedding.weight.grad

    def work(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        lm = deepcopy(whole)
        split(lm, ranks)
        return embedded(lm)

    found = on_threads(2, work)
    expected, gradient = embedded(whole)
    for out, _ in found:
        assert torch.equal(out, expected)
    assert torch.equal(torch.cat([grad for _, grad in found]), gradient)
    assert not gradient[7].any()
    assert gradient[11].all()
    if kind is Gemma3TextConfig:  # it scales embeddings, by sqrt(64)
        assert torch.equal(expected[0, 0], 8 * whole.model.embed_tokens.weight[0])


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({}, 3, "tensor=3 does not divide the model's 4 attention heads; set tensor to a .* of 2"),
        ({}, 4, "tensor=4 does not divide the model's 2 key-value heads"),
        ({"vocab_size": 15}, 2, "tensor=2 does not divide the model's 15 tokens of the vocabulary"),
        ({"intermediate_size": 63}, 2, "tensor=2 does not divide the 63 outputs of layers.0.mlp"),
        ({"attention_bias": True}, 2, r"layers.0.self_attn.o_proj has a bias"),
    ],
)
def test_what_does_not_divide_is_named(sizes, size, message):
    with pytest.raises(ConfigError, match=message):
        split(lm_of(**sizes), TensorRanks(None, size))


def test_other_plans_than_of_dense_layers_are_refused():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(ConfigError, match=r"splits 'layers.*experts.* only dense layers are split"):
        styles_of(lm_of(Qwen3MoeConfig, **experts).base_model)
    sizes = {"vocab_size": 8, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, **sizes)
    gpt = AutoModelForCausalLM.from_config(config)
    require_divisible(gpt, 2)
    with pytest.raises(ConfigError, match=r"no tensor-parallel plan of it .* set tensor: 1"):
        styles_of(gpt.base_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": LoRA(rank=4, quantization=NF4())}, "tensor=2: weights that lora.quantization"),
        ({"lora": LoRA(rank=4, options={"use_dora": True})}, "tensor=2: lora.options.use_dora"),
        ({"compile_layers": True}, "tensor=2: compile is not proven for split layers"),
    ],
)
def test_policies_that_cannot_be_split_yet(model, options, message):
    policy = Policy(str(model), **options)
    with pytest.raises(ConfigError, match=message):
        policy.split(TensorRanks(None, 2))


@pytest.mark.parametrize("shared", ["tensor", "expert"])
def test_the_strategy_knows_its_sizes(tmp_path, shared):
    with pytest.raises(ConfigError, match=f"{shared}=0 must be >= 1"):
        ShardedStrategy(**{shared: 0})
    with pytest.raises(ConfigError, match="tensor=2, expert=2: matrices of a mixture"):
        ShardedStrategy(tensor=2, expert=2)
    strategy = ShardedStrategy(**{shared: 2})
    trainer_of(tmp_path, devices=3, strategy=strategy, logger=False)
    with pytest.raises(ConfigError, match=f"{shared}=2 does not divide the run's 3 processes"):
        strategy.setup_environment()


def test_what_was_tried_on_cpus_only_is_experimental_on_gpus(recwarn):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    warn_if_experimental(cpu, sequence=2, tensor=2, expert=1)
    warn_if_experimental(gpu, sequence=1, tensor=1, expert=1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="^sequence=2, expert=4: this is experimental"):
        warn_if_experimental(gpu, sequence=2, tensor=1, expert=4)
