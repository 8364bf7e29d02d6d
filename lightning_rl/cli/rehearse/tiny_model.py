"""Tiny models of the architecture of big ones, made from their configurations alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.errors import ConfigError
from lightning_rl.models.pretrained import Loading, load_config, skeleton
from lightning_rl.models.tokenizer import load_tokenizer, save_tokenizer

HEAD = 32
"""The width of a head: vLLM computes no smaller one on CPUs."""
MOST_HEADS, MOST_LAYERS = 8, 8
MOST_PARAMETERS = 300_000_000
"""A model with more did not become smaller where it should have."""
_END_LOGITS = 12.0
"""Standard deviation of the logits of end tokens: some completions end, after some tokens each."""
_SMALLER = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
}
"""The most that a configuration's value may be, by its name."""
_RECURRENT = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
)
"""Names of the number and the width of the heads of layers that carry a state."""


def write_tiny(model: str, loading: Loading, folder: Path) -> int:
    """Write a tiny model of the same architecture, with the model's tokenizer, into a folder.

    Its weights are random, and always the same. Only the configuration and the tokenizer of
    ``model`` are read.

    Returns:
        The number of its parameters.

    Raises:
        ConfigError: if the configuration cannot be read, or no small model be made from it.
    """
    config, tokenizer = shrunk(load_config(model, loading)), load_tokenizer(model, loading)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = skeleton(config, loading, None).float()
        _let_end(lm, end_tokens_of(tokenizer).token_ids)
    lm.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    loading.copy_code(model, folder)
    return sum(p.numel() for p in lm.parameters())


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a tiny model with the same vocabulary and kinds of layers.

    It keeps which layers attend to a window, carry a state, or have experts; the ratio of heads to
    those of keys; and whether embeddings are tied.

    Raises:
        ConfigError: if transformers refuses the small configuration, or the model is not small.
    """
    if config.get_text_config() is not config:
        raise ConfigError(
            f"no tiny {type(config).__name__} is made: models that read pictures are not rehearsed"
        )
    layers = _layers(config)
    values = _sizes(config, layers)
    try:
        small = type(config).from_dict(_fitted(config, values, layers))
        with torch.device("meta"):
            count = sum(p.numel() for p in skeleton(small, Loading(), None).parameters())
    except Exception as error:  # each class checks its sizes in its own way
        raise ConfigError(
            f"no tiny model is made of a {type(config).__name__}: {error}; its sizes were changed "
            f"to {values}"
        ) from error
    if count > MOST_PARAMETERS:
        raise ConfigError(
            f"a {type(config).__name__} has still {count:,} parameters when made small "
            f"(at most {MOST_PARAMETERS:,}); its sizes were changed to {values}"
        )
    return small


def _sizes(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """Return the values that change, by their names in the configuration's file."""
    heads = getattr(config, "num_attention_heads", None) or 2
    keys = getattr(config, "num_key_value_heads", None) or heads
    ratio = min(max(1, heads // keys), MOST_HEADS)
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": 2 if ratio == 1 else ratio,
        "num_key_value_heads": 2 if ratio == 1 else 1,
        "head_dim": HEAD,
    }
    if "qk_rope_head_dim" in vars(config):  # latent attention: its heads share no keys
        sizes["head_dim"] = _SMALLER["qk_rope_head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes["hidden_size"] = sizes["num_attention_heads"] * HEAD
    sizes["intermediate_size"] = 2 * sizes["hidden_size"]
    for name, most in _SMALLER.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            sizes[name] = min(value, most)
    known = vars(config)
    if "linear_num_value_heads" in known:
        values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        sizes["linear_num_value_heads"] = values_per_key * sizes["linear_num_key_heads"]
    for heads_of, width_of in _RECURRENT:
        if heads_of in known and width_of in known:
            expansion = int(getattr(config, "mamba_expand", getattr(config, "expand", 2)))
            sizes[width_of] = HEAD
            sizes[heads_of] = expansion * sizes["hidden_size"] // HEAD
            sizes["mamba_d_ssm"] = expansion * sizes["hidden_size"]
    named = {config.attribute_map.get(name, name): size for name, size in sizes.items()}
    return {name: size for name, size in named.items() if name in known}


def _layers(config: PretrainedConfig) -> int:
    """Return the length of the shortest beginning that has all kinds of layers."""
    count = config.num_hidden_layers
    least = 2
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and _are_kinds(value):
            least = max(least, *(value.index(kind) + 1 for kind in set(value)))
        elif name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
            least = max(least, value if isinstance(value, int) else 0)
    if getattr(config, "first_k_dense_replace", 0):
        least = max(least, _SMALLER["first_k_dense_replace"] + 1)
    return min(count, least, MOST_LAYERS)


def _are_kinds(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str | int) for value in values)


def _fitted(config: PretrainedConfig, sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return all values of the small configuration: lists with a value per layer are cut too."""
    values = config.to_dict() | sizes
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values[name] = value[:layers]
        elif name == "mlp_only_layers" and value:
            values[name] = [layer for layer in value if layer < layers]
        elif name == "max_window_layers" and value is not None:
            values[name] = min(value, layers)
    return values


def _let_end(lm: PreTrainedModel, end_tokens: Iterable[int]) -> None:
    """Make some contexts end a completion, since with random weights hardly any would.

    A final state has a norm of about sqrt(width) after its normalisation, so a row of norm s has
    logits with a standard deviation of about s.
    """
    head = lm.get_output_embeddings()
    if head is None:
        return
    with torch.no_grad():
        for token in end_tokens:
            row = torch.randn_like(head.weight[token])  # one that also pads was made of zeros
            head.weight[token] = row * (_END_LOGITS / row.norm())
