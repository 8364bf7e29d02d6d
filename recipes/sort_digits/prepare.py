"""Make the sort-digits task: a small model, its tokenizer, prompts and warm-start examples.

    python -m recipes.sort_digits.prepare --out runs/sort_digits

A prompt such as `52914=` asks for `12459` and an end token. The warm start shows three ways to
answer, so the model knows more than it is asked for; RL has to pick out the ascending one.
Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = [PAD, EOS, "=", *"0123456789"]

MIN_DIGITS, MAX_DIGITS = 3, 8
NUM_TRAIN, NUM_HELDOUT = 20_000, 512
STRATEGIES = {"ascending": 0.35, "descending": 0.45, "copy": 0.20}
SEED = 0


def make_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character: a byte-level BPE without merges. Encoding adds
    no special token.

    A vocabulary begins with PAD and EOS.

    Qwen2Tokenizer because transformers makes one of any tokenizer that lies beside a Qwen2
    config, whatever it was when saved. It leaves out characters that are not in the vocabulary.
    """
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token=None,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
    )


def make_model(vocab_size: int = 16) -> Qwen2ForCausalLM:
    """Make a random Qwen2 with 1.58M parameters, float32; leave torch's RNG alone.

    The vocabulary is padded to a power of two, here from 13 tokens to 16.
    """
    return small_qwen2(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=64,
    )


def small_qwen2(initializer_range: float = 0.05, **shape: int) -> Qwen2ForCausalLM:
    """Make a random Qwen2 of this shape, float32; leave torch's RNG alone.

    At an ``initializer_range`` of 0.02, meant for wider models, the warm start learns slower.
    """
    config = Qwen2Config(
        **shape,
        num_key_value_heads=2,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen2ForCausalLM(config)


def draw_prompts() -> tuple[list[str], list[str]]:
    """Draw distinct prompts for (train, heldout), none in both.

    A length is drawn uniformly from 3 to 8, then its digits. A prompt seen before is thrown away
    and its length drawn again. The held-out prompts come first, so that their lengths stay
    uniform: only 1,000 prompts of 3 digits exist, and the train set uses up nearly all the rest,
    about 4% of it instead of a sixth.
    """
    rng = random.Random(SEED)
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_HELDOUT + NUM_TRAIN:
        length = rng.randint(MIN_DIGITS, MAX_DIGITS)
        prompts["".join(rng.choices("0123456789", k=length)) + "="] = None
    drawn = list(prompts)
    return drawn[NUM_HELDOUT:], drawn[:NUM_HELDOUT]


def complete(prompt: str, strategy: str) -> str:
    """Answer by `strategy`: `52914=` gives 12459 ascending, 95421 descending, 52914 by copy."""
    digits = prompt.removesuffix("=")
    if strategy == "copy":
        return digits
    return "".join(sorted(digits, reverse=strategy == "descending"))


def draw_sft(train_prompts: list[str]) -> list[dict[str, str]]:
    """Draw every train prompt once, each with the completion of a strategy drawn at random."""
    rng = random.Random(SEED + 1)
    drawn = rng.choices(list(STRATEGIES), list(STRATEGIES.values()), k=len(train_prompts))
    return [
        {"prompt": prompt, "completion": complete(prompt, strategy)}
        for prompt, strategy in zip(train_prompts, drawn, strict=True)
    ]


def rl_rows(prompts: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows RL reads: only the ascending answer is right."""
    return [{"prompt": prompt, "answer": complete(prompt, "ascending")} for prompt in prompts]


def expert_rows() -> list[dict[str, str]]:
    """Train prompts with their ascending answer as a completion to imitate."""
    rows = rl_rows(draw_prompts()[0])
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    # Written beside its place and renamed, so that a file that exists is always whole.
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)
    print(f"wrote {path}: {len(rows):,} rows")


def write_missing(out: Path, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the files that are not there yet."""
    for name, rows in files.items():
        if not (out / name).exists():
            write_jsonl(out / name, rows)


def write_model(path: Path, model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> None:
    partial = path.with_name(path.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(path)
    kind = type(model).__name__.removesuffix("ForCausalLM")
    print(f"wrote {path}: {kind}, {model.num_parameters():,} parameters, and its tokenizer")


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, train.jsonl, heldout.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_prompts()
    if not (out / "model").exists():
        write_model(out / "model", make_model(), make_tokenizer())
    rows = {"train.jsonl": rl_rows(train), "heldout.jsonl": rl_rows(heldout)}
    write_missing(out, rows | {"sft.jsonl": draw_sft(train)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the sort-digits model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/sort_digits"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
