"""Provide random models, byte-level tokenizers, and the chat templates of real models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATES = Path(__file__).parent / "templates"
END_TOKENS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*special: str, eos: str, template: str) -> Qwen2Tokenizer:
    """Make a tokenizer with a token per byte, after padding and the specials given."""
    tokens = ["<|endoftext|>", *special, *bytes_to_unicode().values()]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], eos_token=eos,
        pad_token="<|endoftext|>", unk_token=None,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer of chats in the plainest format."""
    return byte_tokenizer("<|im_start|>", "<|im_end|>", eos="<|im_end|>", template=CHATML)


def word_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word of these texts, for the plainest chat format."""
    words = Tokenizer(WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words.train_from_iterator(texts, WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHATML,
    )


def chat_tokenizer(
    name: str, eos: str | None = None, template: str | None = None
) -> Qwen2Tokenizer:
    """Make a tokenizer of the named model's chats; ``template`` replaces the model's own."""
    eos = eos or END_TOKENS[name]
    template = template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = byte_tokenizer(eos, "<|begin|>", "<|python_tag|>", eos=eos, template=template)
    tokenizer.add_special_tokens(
        {"bos_token": "<|begin|>", "additional_special_tokens": ["<|python_tag|>"]}
    )
    return tokenizer


def save_random_model(
    directory: Path, tokenizer: Any, kind: type[PreTrainedConfig] = Qwen2Config, **sizes: Any
) -> None:
    """Save two layers, and about as many tokens as the tokenizer's unless ``sizes`` differ."""
    config = kind(
        **{
            # A real model's would take more time than all else; this is one that ranks can share.
            "vocab_size": -(-len(tokenizer) // 16) * 16,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # of size 32, the least that vLLM computes on CPUs
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        | sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_chat_model(directory: Path, name: str) -> None:
    """Save a model that reads bytes, with the named template."""
    sizes: dict[str, Any] = {"max_position_embeddings": 2048, "initializer_range": 0.1}
    save_random_model(directory, chat_tokenizer(name), vocab_size=288, **sizes)


def save_untied_llama(directory: Path, model: Path) -> None:
    """Save a model with an output layer of its own, that reads and writes another one's tokens."""
    save_random_model(
        directory, AutoTokenizer.from_pretrained(model), LlamaConfig, vocab_size=16,
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
