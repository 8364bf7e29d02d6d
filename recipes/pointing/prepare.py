"""Make what the pointing recipe needs: a small model, its tokenizer, rows and warm-start turns.

    python -m recipes.pointing.prepare --out runs/pointing

The warm start shows the turns of all agents. Half of its provers point at their digit if they can,
half of its verifiers believe what they are shown; the others do anything. Every file is the same on
every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken, Qwen2ForCausalLM, Qwen2Tokenizer

from lightning_rl.extend import Message
from lightning_rl.games import Adp, Conversation, Debate, Protocol, SoloVerifier
from recipes.pointing.scenario import OTHER, PLACES, POINT, QUESTION, WANTED, Pointing
from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_tokenizer,
    small_qwen2,
    write_missing,
    write_model,
)

DIGITS = "0123456789"
NEWLINE = "\u010a"  # as byte-level vocabularies write it
ROLES = ["<|user|>", "<|assistant|>"]
PHRASES = [*POINT.values(), QUESTION, "prover: ", "prover0: ", "prover1: "]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TRAIN, NUM_HELDOUT = 20_000, 256
KNOWING = 0.5
"""The share of turns in the warm start that are as they should be, where that can be known."""
SEED = 0


def chat_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token for each digit, place, and fixed part of a message."""
    tokenizer = make_tokenizer([PAD, EOS, NEWLINE, *DIGITS, *PLACES])
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_pointer() -> Qwen2ForCausalLM:
    """Make a random Qwen2 with two layers, float32; leave torch's RNG alone."""
    return small_qwen2(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )


def draw_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw distinct rows for (train, heldout), none in both; as many of each label."""
    rng = random.Random(SEED)
    others = [digit for digit in DIGITS if digit not in (WANTED, OTHER)]
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < NUM_HELDOUT + NUM_TRAIN:
        label = len(rows) % 2
        digits = [WANTED if label else OTHER, *rng.choices(others, k=len(PLACES) - 1)]
        rng.shuffle(digits)
        prompt = "".join(digits)
        rows.setdefault(prompt, {"prompt": prompt, "label": label})
    drawn = list(rows.values())
    return drawn[NUM_HELDOUT:], drawn[:NUM_HELDOUT]


def answer(agent: str, chat: list[Message], row: dict[str, Any], rng: random.Random) -> str:
    """Return the message of a warm-start agent."""
    if agent == "verifier":
        shown = [line[-1] for line in chat[-1]["content"].split("\n")[1:]]
        known = [digit for digit in (WANTED, OTHER) if digit in shown]
        anything = [WANTED, OTHER]
    else:
        mine = OTHER if agent == "prover0" else WANTED
        known = [place for place, digit in zip(PLACES, row["prompt"], strict=True) if digit == mine]
        anything = list(PLACES)
    return rng.choice(known if known and rng.random() < KNOWING else anything)


def draw_sft(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw the turns of one interaction about every row, by three protocols in turn."""
    rng = random.Random(SEED + 1)
    protocols: list[Protocol] = [Adp(), Debate(2), SoloVerifier()]
    scenario = Pointing()
    turns = []
    for number, row in enumerate(rows):
        state = Conversation.begin(protocols[number % 3], scenario, row)
        while asked := state.asks():
            answers = {name: answer(name, chat, row, rng) for name, chat in asked.items()}
            turns += [{"prompt": asked[name], "completion": said} for name, said in answers.items()]
            state = state.after(answers)
    return turns


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, train.jsonl, heldout.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_rows()
    if not (out / "model").exists():
        write_model(out / "model", make_pointer(), chat_tokenizer())
    rows = {"train.jsonl": train, "heldout.jsonl": heldout}
    write_missing(out, rows | {"sft.jsonl": draw_sft(train)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pointing model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/pointing"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
