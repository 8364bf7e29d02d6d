"""Make what the pointing recipe needs: a small model, its tokenizer, rows and warm-start turns.

    python -m recipes.pointing.prepare --out runs/pointing

The warm start shows the turns of all agents. Most provers in it point anywhere, and most verifiers
guess; some do what RL has to find out. Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken, Qwen2Tokenizer

from lightning_rl import Adp, Conversation, Debate, Message, Protocol, SoloVerifier
from recipes.pointing.scenario import END, IN, IS_THERE, OR, PLACES, POINT, Pointing
from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_model,
    make_tokenizer,
    write_missing,
    write_model,
)

DIGITS = "0123456789"
NEWLINE = "\u010a"  # as byte-level vocabularies write it
ROLES = ["<|user|>", "<|assistant|>"]
WORDS = [POINT, IN, IS_THERE, OR, "prover: ", "prover0: ", "prover1: ", "first", "second"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TRAIN, NUM_HELDOUT, NUM_SHOWN = 20_000, 256, 6_000
KNOWING = 0.5
"""The share of turns in the warm start that are as they should be; the others are at random."""
SEED = 0


def chat_tokenizer() -> Qwen2Tokenizer:
    """One token for each digit, place, and fixed part of a message."""
    tokenizer = make_tokenizer([PAD, EOS, NEWLINE, END, *DIGITS, *PLACES])
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def draw_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for (train, heldout), none of the digits in both; as many of each label."""
    rng = random.Random(SEED)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < NUM_HELDOUT + NUM_TRAIN:
        first, second = rng.sample(DIGITS, 2)
        label = len(rows) % 2
        there = first if label else second
        others = [digit for digit in DIGITS if digit not in (first, second)]
        digits = [there, *rng.choices(others, k=len(PLACES) - 1)]
        rng.shuffle(digits)
        prompt = "".join(digits)
        if prompt not in rows:
            rows[prompt] = {"prompt": prompt, "first": first, "second": second, "label": label}
    drawn = list(rows.values())
    return drawn[NUM_HELDOUT:], drawn[:NUM_HELDOUT]


def turn(agent: str, chat: list[Message], row: dict[str, Any], rng: random.Random) -> str:
    """What an agent of the warm start answers."""
    knows = rng.random() < KNOWING
    if agent != "verifier":
        mine = row["second" if agent == "prover0" else "first"]
        return (
            PLACES[row["prompt"].index(mine)]
            if knows and mine in row["prompt"]
            else rng.choice(PLACES)
        )
    shown = [line[-1] for line in chat[-1]["content"].split("\n")[1:]]
    seen = [word for word in ("first", "second") if row[word] in shown]
    return seen[0] if knows and seen else rng.choice(["first", "second"])


def draw_sft(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of one interaction about every row, by protocols in turn."""
    rng = random.Random(SEED + 1)
    protocols: list[Protocol] = [Adp(), Debate(2), SoloVerifier()]
    turns = []
    for number, row in enumerate(rows):
        state = Conversation.begin(protocols[number % 3], Pointing(), row)
        while asked := state.asks():
            answers = {agent: turn(agent, chat, row, rng) for agent, chat in asked.items()}
            turns += [{"prompt": asked[name], "completion": said} for name, said in answers.items()]
            state = state.after(answers)
    return turns


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, train.jsonl, heldout.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_rows()
    if not (out / "model").exists():
        write_model(out / "model", make_model(vocab_size=64), chat_tokenizer())
    rows = {"train.jsonl": train, "heldout.jsonl": heldout}
    write_missing(out, rows | {"sft.jsonl": draw_sft(train[:NUM_SHOWN])})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pointing model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/pointing"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
