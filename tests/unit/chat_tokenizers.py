"""Byte-level tokenizers with the chat templates of real models, and a random model for them."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
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


def chat_tokenizer(name: str, eos: str | None = None, template: str | None = None):
    """One token per byte, and the specials; ``template`` in place of the named model's own."""
    eos = eos or END_TOKENS[name]
    special = ["<|endoftext|>", eos, "<|begin|>", "<|python_tag|>"]
    vocab = {token: i for i, token in enumerate([*special, *bytes_to_unicode().values()])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token=eos, pad_token="<|endoftext|>", unk_token=None
    )
    tokenizer.add_special_tokens(
        {"bos_token": "<|begin|>", "additional_special_tokens": ["<|python_tag|>"]}
    )
    tokenizer.chat_template = template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def save_chat_model(directory: Path, name: str) -> None:
    """A random 2-layer Qwen2 that reads bytes, with the named template."""
    tokenizer = chat_tokenizer(name)
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32, the least that vLLM computes on CPUs
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
