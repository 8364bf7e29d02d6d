"""Provide architectures of causal LMs that people train, each as a tiny random model.

What holds for all of them is in tests/conformance/test_architectures.py; the table in
docs/models.md shows it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf

from recipes.sort_digits.prepare import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 16, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip
"""The default sizes; a head of 32 is the least that vLLM computes on CPUs."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}

Layout = Literal["packed", "unpacked", "refused"]


@dataclass(frozen=True)
class Architecture:
    """One of transformers' causal LMs.

    Args:
        kind: its configuration is transformers' ``<kind>Config``.
        sizes: what it is configured by beside SIZES.
        layout: how rollouts are scored: several in a row, one in a row, or not at all.
        vllm: whether vLLM's CPU build computes it, which a test tries.
        engine: whether TransformersEngine writes with it.
        models: what people know of it.
    """

    kind: str
    sizes: dict[str, Any]
    layout: Layout = "packed"
    vllm: bool = False
    engine: bool = True
    models: str = ""

    def config(self) -> hf.PreTrainedConfig:
        made: hf.PreTrainedConfig = getattr(hf, f"{self.kind}Config")(**SIZES | self.sizes)
        return made

    def save(self, directory: Path) -> Path:
        """Write random weights, always the same, and a tokenizer of digits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = hf.AutoModelForCausalLM.from_config(self.config()).float()
            for name, parameter in lm.named_parameters():
                if name.endswith("bias"):  # zero by default, which would hide one left out
                    torch.nn.init.normal_(parameter, std=0.2)
        lm.save_pretrained(directory)
        make_tokenizer().save_pretrained(directory)
        return directory


ARCHITECTURES = {
    "llama": Architecture("Llama", {}, vllm=True, models="Llama 2 and 3, SmolLM2, Yi"),
    "mistral": Architecture("Mistral", {"sliding_window": 5}, vllm=True),
    "ministral": Architecture("Ministral", WINDOWS, vllm=True),
    "mixtral": Architecture(
        "Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, vllm=True
    ),
    "qwen2": Architecture("Qwen2", {}, vllm=True, models="Qwen 1.5, 2 and 2.5"),
    "qwen2_windows": Architecture(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 1}
    ),
    "qwen2_moe": Architecture(
        "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 32}, vllm=True
    ),
    "qwen3": Architecture("Qwen3", {}, vllm=True),
    "qwen3_moe": Architecture("Qwen3Moe", EXPERTS, vllm=True),
    "gemma": Architecture("Gemma", {}, vllm=True),
    "gemma3_text": Architecture("Gemma3Text", WINDOWS, vllm=True, models="Gemma 3"),
    "gpt2": Architecture("GPT2", GPT2, vllm=True),
    "gpt_neox": Architecture("GPTNeoX", {}, models="Pythia"),
    "gptj": Architecture("GPTJ", GPT2 | {"rotary_dim": 16}, "unpacked", vllm=True),
    "gpt_bigcode": Architecture("GPTBigCode", GPT2, vllm=True, models="StarCoder"),
    "phi": Architecture("Phi", {}, models="Phi 1 and 2"),
    "phi3": Architecture("Phi3", {}, vllm=True, models="Phi 3 and 4"),
    "phimoe": Architecture("Phimoe", {"num_local_experts": 4}),
    "opt": Architecture(
        "OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64, "init_std": 0.2, "dropout": 0.5},
        vllm=True,
    ),
    "olmo": Architecture("Olmo", {}, vllm=True),
    "olmo2": Architecture("Olmo2", {}, vllm=True),
    "olmo3": Architecture("Olmo3", WINDOWS, vllm=True),
    "olmoe": Architecture("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, vllm=True),
    "starcoder2": Architecture("Starcoder2", {}, vllm=True),
    "smollm3": Architecture("SmolLM3", {}, vllm=True),
    "glm": Architecture("Glm", {}, vllm=True),
    "glm4": Architecture("Glm4", {}, vllm=True),
    "glm4_moe": Architecture("Glm4Moe", ROUTED, vllm=True, models="GLM 4.5 and 4.6"),
    "deepseek_v2": Architecture("DeepseekV2", ROUTED | LATENT),
    "deepseek_v3": Architecture("DeepseekV3", ROUTED | LATENT, models="DeepSeek V3 and R1"),
    "ernie4_5": Architecture("Ernie4_5", {}, vllm=True),
    "exaone4": Architecture("Exaone4", WINDOWS, vllm=True),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1", {}, vllm=True),
    "seed_oss": Architecture("SeedOss", {}, vllm=True),
    "arcee": Architecture("Arcee", {}, vllm=True),
    "apertus": Architecture("Apertus", {}, vllm=True),
    "helium": Architecture("Helium", {}, vllm=True),
    "nemotron": Architecture("Nemotron", {}, "unpacked", vllm=True),
    "nanochat": Architecture("NanoChat", {}, vllm=True),
    "dots1": Architecture("Dots1", ROUTED),
    "minimax_m2": Architecture("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": Architecture(
        "Llama4Text", {"num_local_experts": 2, "intermediate_size_mlp": 64}, "refused",
        models="Llama 4",
    ),
    "stablelm": Architecture("StableLm", {}, "unpacked", vllm=True),
    "persimmon": Architecture("Persimmon", {}),
    "bloom": Architecture("Bloom", {"n_layer": 2, "n_head": 2}, "unpacked"),
    "cohere": Architecture("Cohere", {}, vllm=True, models="Command R, Aya"),
    "cohere2": Architecture("Cohere2", WINDOWS, models="Command A"),
    "gemma2": Architecture("Gemma2", {}, vllm=True),
    "gemma3n_text": Architecture(
        "Gemma3nText",
        {
            "vocab_size_per_layer_input": 16, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
            "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        vllm=True, models="Gemma 3n",
    ),
    "gemma4_text": Architecture("Gemma4Text", WINDOWS, vllm=True, models="Gemma 4"),
    "granite": Architecture("Granite", {"logits_scaling": 2.0}, vllm=True),
    "granitemoe": Architecture(
        "GraniteMoe", {"num_local_experts": 4, "logits_scaling": 2.0}, vllm=True
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybrid",
        MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 0,
                  "shared_intermediate_size": 64, "logits_scaling": 2.0},
        "unpacked", vllm=True, models="Granite 4",
    ),
    "gpt_oss": Architecture(
        "GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "lfm2": Architecture("Lfm2", {"layer_types": ["conv", "full_attention"]}, "unpacked"),
    "qwen3_next": Architecture("Qwen3Next", EXPERTS | LINEAR, "unpacked"),
    "qwen3_5_text": Architecture("Qwen3_5Text", LINEAR, "unpacked", models="Qwen 3.5"),
    "nemotron_h": Architecture(
        "NemotronH",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32,
         "ssm_state_size": 8, "n_groups": 1},
        "unpacked", vllm=True,
    ),
    "mamba": Architecture("Mamba", {"state_size": 8}, "unpacked"),
    "mamba2": Architecture(
        "Mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1}, "unpacked"
    ),
    "falcon_h1": Architecture("FalconH1", MAMBA2 | {"mamba_d_ssm": 128}, "unpacked", vllm=True),
    "jamba": Architecture(
        "Jamba",
        {"num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False,
         "attn_layer_period": 2, "attn_layer_offset": 1},
        "unpacked",
    ),
    "bamba": Architecture("Bamba", MAMBA2 | {"attn_layer_indices": [1]}, "unpacked"),
    "recurrent_gemma": Architecture(
        "RecurrentGemma", {"block_types": ["recurrent", "attention"], "lru_width": 64}, "unpacked",
        engine=False,
    ),
}  # fmt: skip
"""The architectures by transformers' names for them."""
