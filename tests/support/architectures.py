"""Tiny models of architectures whose layers are not attention alone, or attend in their own way."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
import transformers as hf

from lightning_rl.models.policy import Policy
from recipes.sort_digits.prepare import make_tokenizer

TOKENS = {"vocab_size": 16, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
WIDTH = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = TOKENS | HEADS | WIDTH | {"num_key_value_heads": 2}

NARROW = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
RULES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

UNPACKED = {
    "lfm2": lambda: hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **GROUPED, **RULES, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, mlp_only_layers=[0, 1],
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**GROUPED, **RULES, head_dim=8),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **GROUPED, layers_block_type=["linear_attention", "full_attention"], head_dim=8,
        mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=4,
    ),
    # Its logits are divided, too.
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **GROUPED, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=8,
        mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4, num_local_experts=0,
        shared_intermediate_size=32, logits_scaling=3.0, position_embedding_type="rope",
    ),
    # Each layer attends and carries a state on.
    "falcon_h1": lambda: hf.FalconH1Config(
        **GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=4, lm_head_multiplier=0.5,
    ),
    "mamba": lambda: hf.MambaConfig(**NARROW),
    "mamba2": lambda: hf.Mamba2Config(
        **NARROW, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=4
    ),
    # Layers that hand no arguments on to their attention.
    "stablelm": lambda: hf.StableLmConfig(**GROUPED),
    # A table of attention classes.
    "falcon": lambda: hf.FalconConfig(**NARROW, num_attention_heads=4),
}  # fmt: skip


def saved(config, directory: Path) -> str:
    """Save a model with random weights and the tokenizer of digits; return its directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide where they go
                    parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


@cache
def _loaded(model) -> Policy:
    return Policy(str(model))


def policy_of(model) -> Policy:
    """Return a policy of its own: to copy one takes a fifteenth of the time of loading it."""
    return deepcopy(_loaded(model))


def scored_alone(model, rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies of all model tokens, one forward per rollout."""
    logprobs, entropies = [], []
    for rollout in rollouts:
        ids = torch.tensor(rollout.prompt.token_ids + rollout.token_ids)
        start = len(rollout.prompt.token_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        log_p = (logits / rollout.sampling.temperature).log_softmax(-1)[
            torch.tensor(rollout.loss_mask)
        ]
        targets = ids[start:][torch.tensor(rollout.loss_mask)]
        logprobs.append(log_p.gather(-1, targets[:, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def own_scores(lm, rollouts) -> torch.Tensor:
    """Return logprobs (M,) of what a model wrote, each rollout alone, by transformers' forward."""
    return scored_alone(lm, rollouts)[0]
