"""Make the notes task: a small model, its chat format, texts, and warm-start turns.

    python -m recipes.notes.prepare --out runs/notes

A text such as `k3fx9a1` has digits among letters. The agent asks twice: `note k3fx9a1`, and then
`sort 391` with whatever was noted. The warm start shows three ways to answer each, of which one is
right. Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer

from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_model,
    make_tokenizer,
    write_missing,
    write_model,
)

ROLES = ["<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LETTERS, DIGITS = "abcdefghijklm", "0123456789"
VOCABULARY = [PAD, EOS, "Ġ", *"abcdefghijklmnorst", *DIGITS]  # Ġ: the space of byte-level BPE

MIN_DIGITS, MAX_DIGITS, MAX_LETTERS = 3, 5, 6
NUM_TRAIN, NUM_HELDOUT = 20_000, 256
NOTES = {"digits": 0.5, "half": 0.3, "letters": 0.2}
ORDERS = {"ascending": 0.5, "descending": 0.3, "copy": 0.2}
SEED = 0


def make_chat_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character and per role."""
    tokenizer = make_tokenizer(vocabulary)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def draw_texts() -> tuple[list[str], list[str]]:
    """Draw distinct texts for (train, heldout), none in both: 3 to 5 digits among letters."""
    rng = random.Random(SEED)
    texts: dict[str, None] = {}
    while len(texts) < NUM_HELDOUT + NUM_TRAIN:
        characters = rng.choices(DIGITS, k=rng.randint(MIN_DIGITS, MAX_DIGITS))
        characters += rng.choices(LETTERS, k=rng.randint(1, MAX_LETTERS))
        rng.shuffle(characters)
        texts["".join(characters)] = None
    drawn = list(texts)
    return drawn[NUM_HELDOUT:], drawn[:NUM_HELDOUT]


def note(text: str, way: str) -> str:
    """Write down what `way` keeps of a text: all digits, the first half of them, or the letters."""
    digits = "".join(c for c in text if c in DIGITS)
    if way == "letters":
        return "".join(c for c in text if c in LETTERS)
    return digits if way == "digits" else digits[: len(digits) // 2]


def order(digits: str, way: str) -> str:
    """Order digits as `way` does."""
    return digits if way == "copy" else "".join(sorted(digits, reverse=way == "descending"))


def rl_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows RL reads: a text, and the answer that only the reward sees."""
    return [
        {
            "prompt": [{"role": "user", "content": f"note {text}"}],
            "answer": order(note(text, "digits"), "ascending"),
        }
        for text in texts
    ]


def sft_rows(text: str, rng: random.Random) -> list[dict[str, str]]:
    """Return two turns about a text, each in a way drawn at random."""
    (way,) = rng.choices(list(NOTES), list(NOTES.values()))
    (direction,) = rng.choices(list(ORDERS), list(ORDERS.values()))
    digits = note(text, "digits")
    turns = {f"note {text}": note(text, way), f"sort {digits}": order(digits, direction)}
    return [
        {"prompt": f"<user>{asked}{EOS}<assistant>", "completion": answer}
        for asked, answer in turns.items()
    ]


def draw_sft(texts: Sequence[str]) -> list[dict[str, str]]:
    """Draw two turns about every text."""
    rng = random.Random(SEED + 1)
    return [row for text in texts for row in sft_rows(text, rng)]


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, train.jsonl, heldout.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_texts()
    if not (out / "model").exists():
        write_model(out / "model", make_model(vocab_size=64), make_chat_tokenizer())
    rows = {"train.jsonl": rl_rows(train), "heldout.jsonl": rl_rows(heldout)}
    write_missing(out, rows | {"sft.jsonl": draw_sft(train)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the notes model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/notes"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
