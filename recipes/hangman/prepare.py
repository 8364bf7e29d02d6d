"""Make what the hangman recipe needs: a small model, its tokenizer, the words and warm-start turns.

    python -m recipes.hangman.prepare --out runs/hangman

The game is TextArena's, as verifiers brings it. Its texts are read from it, once: each line of its
instructions becomes a single token, so that a prompt has some forty tokens in place of 1,500. The
warm start shows how a guess is written, and guesses letters at random. Every file is the same on
every run.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from transformers import AddedToken, Qwen2Tokenizer

from lightning_rl.verifiers import VerifiersPrompts
from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_model,
    make_tokenizer,
    write_missing,
    write_model,
)

ENVIRONMENT = "build/verifiers"
WORDS = [
    "ant", "art", "ate", "ear", "eat", "era", "net", "ran", "rat", "sat",
    "sea", "sin", "sir", "sit", "tan", "tar", "tea", "ten", "tie", "tin",
]  # fmt: skip
"""All of seven letters, which is what there is to find out."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLUMNS = "C00 C01 C02"
SPACE, NEWLINE = "\u0120", "\u010a"  # as byte-level vocabularies write them
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = 8
NUM_GAMES = 2_000
SEED = 0


def write_words(place: Path) -> None:
    """Write the word list where NLTK_DATA leads the game to it; NLTK's own would be downloaded."""
    place.mkdir(parents=True, exist_ok=True)
    for name in ("en-basic", "en"):
        (place / name).write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")


def read_texts(nltk_data: Path) -> tuple[str, str]:
    """Return the system prompt and the first message of the game."""
    prompts = VerifiersPrompts(
        "textarena",
        ENVIRONMENT,
        {"taskset": {"game": "Hangman-v0"}},
        env={"NLTK_DATA": str(nltk_data.absolute())},
        limit=1,
    )
    [(_, row)] = prompts.read()
    system, user = row["prompt"]
    return system["content"], user["content"]


def chat_tokenizer(system: str, first: str) -> Qwen2Tokenizer:
    """Make a tokenizer with a token per character of boards and guesses, and per long line."""
    characters = [SPACE, NEWLINE, *"_[]", *LETTERS, *LETTERS.upper()]
    lines = [line for line in f"{system}\n{first}\n{COLUMNS}".split("\n") if len(line) > 8]
    tokenizer = make_tokenizer([PAD, EOS, *characters])
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in dict.fromkeys(lines)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def board(word: str, guessed: set[str]) -> str:
    """Render the game's answer: the letters that were found, each in its column."""
    found = "   ".join(letter.upper() if letter in guessed else "_" for letter in word)
    return f"{COLUMNS}\n  {found}"


def play(system: str, first: str, rng: random.Random) -> list[dict[str, Any]]:
    """Play one game by random guesses, each as a row: the chat so far, and the guess."""
    word, guessed = rng.choice(WORDS), set[str]()
    chat = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    rows = []
    for _ in range(rng.randint(1, TURNS)):
        letter = rng.choice(LETTERS)
        rows.append({"prompt": list(chat), "completion": f"[{letter}]"})
        guessed.add(letter)
        chat += [
            {"role": "assistant", "content": f"[{letter}]"},
            {"role": "user", "content": board(word, guessed)},
        ]
    return rows


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: nltk_data/, model/, sft.jsonl."""
    write_words(out / "nltk_data" / "corpora" / "words")
    if (out / "model").exists() and (out / "sft.jsonl").exists():
        return
    system, first = read_texts(out / "nltk_data")
    if not (out / "model").exists():
        model = make_model(vocab_size=128)
        model.config.max_position_embeddings = 512
        write_model(out / "model", model, chat_tokenizer(system, first))
    rng = random.Random(SEED)
    turns = [row for _ in range(NUM_GAMES) for row in play(system, first, rng)]
    write_missing(out, {"sft.jsonl": turns})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the hangman model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/hangman"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
