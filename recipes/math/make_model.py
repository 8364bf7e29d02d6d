"""Make a stand-in for a model of the recipe: its true shape, random weights, and problems.

    python -m recipes.math.make_model --like qwen3-0.6b --out runs/math

For trying the recipe where there is no GPU, or no network: memory and steps are those of the real
model, what it writes is noise. Writes `OUT/<name>`, `OUT/train.jsonl` and `OUT/heldout.jsonl`;
with `--no_weights` only the model's configuration and tokenizer, which `check --gpus` plans from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from recipes.math.data import problems
from recipes.sort_digits.prepare import write_missing, write_model

ROWS = 151_936
"""Rows of the embedding, which is the output layer too."""
ORDINARY = 151_643
"""Tokens before the special ones, as in Qwen's vocabulary."""
PAD, TURN, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THOUGHT = ["<think>", "</think>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3 opens its thought itself. Random weights would not, so the template does.
THINKING_TEMPLATE = CHAT_TEMPLATE.removesuffix("{% endif %}") + (
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)

SHARED: dict[str, Any] = {
    "vocab_size": ROWS,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": None,
}
SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2.5-0.5b": (Qwen2Config, {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    }),
    "qwen3-0.6b": (Qwen3Config, {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960,
    }),
    "qwen3-1.7b": (Qwen3Config, {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960,
    }),
    "qwen3-8b": (Qwen3Config, {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    }),
}  # fmt: skip


def make_tokenizer(texts: Sequence[str], template: str = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """Train a byte-level BPE on these texts, filled up to as many tokens as Qwen's.

    The fillers are never read; random weights write them, and they can be decoded.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=2000, show_progress=False)
    tokens = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    tokens += [f"<|unused_{place}|>" for place in range(len(tokens), ORDINARY)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=_merges(bpe),
        unk_token=None,
        eos_token=AddedToken(EOS, special=True, normalized=False),
        pad_token=AddedToken(PAD, special=True, normalized=False),
        padding_side="left",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN]})
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in THOUGHT])
    tokenizer.chat_template = template
    return tokenizer


def _merges(bpe: ByteLevelBPETokenizer) -> list[tuple[str, str]]:
    pairs = json.loads(bpe.to_str())["model"]["merges"]
    return [(first, second) for first, second in pairs]


def make_config(name: str, tokenizer: Qwen2Tokenizer, **sizes: Any) -> PreTrainedConfig:
    """Make the model's configuration; `sizes` change its shape."""
    kind, shape = SHAPES[name]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return kind(**SHARED | shape | ends | sizes)


def make_model(name: str, tokenizer: Qwen2Tokenizer, **sizes: Any) -> Any:
    """Make random weights in bfloat16, as the real ones are published; `sizes` change its shape."""
    config = make_config(name, tokenizer, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def prepare(out: Path, name: str, weights: bool = True, **sizes: Any) -> None:
    """Write to `out` what is not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    train = list(problems(1000, seed=0))
    write_missing(out, {"train.jsonl": train, "heldout.jsonl": list(problems(100, seed=1))})
    if (out / name).exists():
        return
    thinks = name.startswith("qwen3")
    texts = [text for row in train for text in row.values()]
    tokenizer = make_tokenizer(texts, THINKING_TEMPLATE if thinks else CHAT_TEMPLATE)
    if weights:
        write_model(out / name, make_model(name, tokenizer, **sizes), tokenizer)
        return
    make_config(name, tokenizer, **sizes).save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--like", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--out", type=Path, default=Path("runs/math"))
    parser.add_argument("--no_weights", action="store_true")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.like, weights=not arguments.no_weights)


if __name__ == "__main__":
    main()
