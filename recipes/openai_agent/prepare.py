"""Make the digits to guess in chats: a small model, its chat format, and warm-start turns.

    python -m recipes.openai_agent.prepare --out runs/openai_agent

The user says `guess`, and then `>` or `<` after each guess. The warm start shows two ways to play:
bisecting, and saying the same digit again and again. Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from recipes.guess_digit.prepare import DIGITS, draw_turns, guesses
from recipes.notes.prepare import make_chat_tokenizer
from recipes.sort_digits.prepare import EOS, PAD, make_model, write_missing, write_model

PROMPT = [{"role": "user", "content": "guess"}]
VOCABULARY = [PAD, EOS, *"gues<>", *"0123456789"]


def play(digit: int, rng: random.Random) -> list[dict[str, str]]:
    """Return the turns of one game, each as a row: what was said so far, and the guess."""
    said, rows = f"<user>guess{EOS}<assistant>", []
    for guess in guesses(digit, rng):
        rows.append({"prompt": said, "completion": str(guess)})
        said += f"{guess}{EOS}<user>{'>' if digit > guess else '<'}{EOS}<assistant>"
    return rows


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, digits.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        write_model(out / "model", make_model(vocab_size=32), make_chat_tokenizer(VOCABULARY))
    digits = [{"prompt": PROMPT, "digit": digit} for digit in DIGITS]
    write_missing(out, {"digits.jsonl": digits, "sft.jsonl": draw_turns(play)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the chat model that guesses digits.")
    parser.add_argument("--out", type=Path, default=Path("runs/openai_agent"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
