"""Provide mixtures of experts at tiny shapes, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from recipes.sort_digits.prepare import make_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of size 32, the least that vLLM computes on CPUs
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that another expert shows in every logprob
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SMALL = {"moe_intermediate_size": 32, "num_experts": 8}
KINDS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SHAPE, **SMALL, head_dim=32, norm_topk_prob=True),
    # Other names in files than in transformers.
    "mixtral": lambda: hf.MixtralConfig(**SHAPE, num_local_experts=4),
    # An expert that all tokens share, and gates that do not sum to one.
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **SHAPE, **SMALL, shared_expert_intermediate_size=32, norm_topk_prob=False
    ),
}
SIGMOIDS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, moe_intermediate_size=32, n_routed_experts=8,
        head_dim=32, n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 2}, moe_intermediate_size=32, n_routed_experts=8,
        n_group=1, topk_group=1, first_k_dense_replace=0, norm_topk_prob=False, q_lora_rank=None,
        kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
    ),
    # Its routers are given the bias by which they choose.
    "minimax_m2": lambda: hf.MiniMaxM2Config(**SHAPE, num_local_experts=8, head_dim=32),
}  # fmt: skip
"""Whose routers score by a sigmoid."""


def saved_mixture(kind: str, directory: Path, **changes: int) -> Path:
    """Save a model of this kind, the same each time, and the tiny tokenizer.

    ``changes``: of its configuration.
    """
    config = (KINDS | SIGMOIDS)[kind]()
    config.update(changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
