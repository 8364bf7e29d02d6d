"""Mixtures of experts at tiny shapes, with random weights."""

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


def saved_mixture(kind: str, directory: Path, **changes: int) -> Path:
    """A directory with a model of this kind, the same each time, and the tiny tokenizer.

    ``changes``: of its configuration.
    """
    config = KINDS[kind]()
    config.update(changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
