"""Test which architectures are scored exactly in micro-batches, and that others are refused."""

import pytest
import torch
import transformers as hf

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Policy
from lightning_rl.models.stacked import FileNames
from tests.support.architectures import GROUPED, HEADS, TOKENS, WIDTH, own_scores, saved
from tests.support.tolerances import gradient_rounding, scores_rounding

GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

EXACT = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=64),
    # Rollouts of up to 26 tokens beyond their windows.
    "mistral, windowed": lambda: hf.MistralConfig(**GROUPED, sliding_window=5),
    "gemma3, windowed": lambda: hf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2, windowed": lambda: hf.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=1, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED, head_dim=8),
    "gpt2": lambda: hf.GPT2Config(**GPT2, initializer_range=0.2),
    # Its output head is not called lm_head.
    "gpt_neox": lambda: hf.GPTNeoXConfig(**TOKENS | HEADS | WIDTH),
    "phi3": lambda: hf.Phi3Config(**GROUPED),
    # Its routers draw experts at random in training, and weigh them by the jitter in evaluation.
    "phimoe": lambda: hf.PhimoeConfig(**GROUPED, num_local_experts=4),
    # Learned positions; its layers keep dropout as a number.
    "opt": lambda: hf.OPTConfig(
        **TOKENS, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.2, dropout=0.5,
    ),
    # Mixture of experts, and no grouped heads.
    "mixtral": lambda: hf.MixtralConfig(
        **GROUPED, num_local_experts=4, router_jitter_noise=0.1
    ),
    # Values narrower than keys.
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **TOKENS | HEADS | WIDTH, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=4, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=16,
    ),
    # Logits multiplied after the head; divided.
    "cohere": lambda: hf.CohereConfig(**GROUPED),
    "cohere2": lambda: hf.Cohere2Config(
        **GROUPED, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "granite": lambda: hf.GraniteConfig(
        **GROUPED, logits_scaling=3.0, embedding_multiplier=2.0, attention_multiplier=0.3
    ),
    # Logits and attention scores capped, at less than they reach.
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=3, query_pre_attn_scalar=8,
        attn_logit_softcapping=0.5, final_logit_softcapping=1.0,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **GROUPED, head_dim=8, global_head_dim=16, sliding_window=3, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=16, final_logit_softcapping=1.0,
    ),
    # Attention sinks.
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
REFUSED = {
    "a transform before the head": (
        lambda: hf.BertConfig(**TOKENS | HEADS | WIDTH, is_decoder=True),
        "differently from single ones",
    ),
    "logits multiplied by what others divide by": (
        lambda: hf.HyperCLOVAXConfig(**GROUPED, logits_scaling=3.0), "differently from single ones",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact(name, tmp_path, random_rollouts):
    directory = saved(EXACT[name](), tmp_path)
    rollouts = random_rollouts(0)
    policy = Policy(directory)
    assert policy.body_pass.packed
    plain = hf.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    own = FileNames(plain).each(plain.state_dict().items())
    assert dict(policy.named_weights()).keys() == dict(own).keys()
    scores = policy(pack_rollouts(rollouts))
    expected = own_scores(plain, rollouts)
    bound = scores_rounding(plain.config.get_text_config(), expected)
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=bound)
    scores.logprobs.square().sum().backward()
    expected.square().sum().backward()
    theirs = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    # Some gradients (of key biases) are zero but for rounding: they are held to the size of all.
    size = torch.stack([g.norm() for g in theirs.values()]).norm()
    for parameter_name, gradient in theirs.items():
        gap = (policy.lm.get_parameter(parameter_name).grad - gradient).norm()
        bound = gradient_rounding(plain.config.get_text_config(), len(expected))
        assert gap <= bound * gradient.norm() + 1e-6 * size, parameter_name


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    build, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        Policy(saved(build(), tmp_path))
