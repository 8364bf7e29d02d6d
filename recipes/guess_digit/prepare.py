"""Make the guess-the-digit task: a small model, its tokenizer, the digits and warm-start turns.

    python -m recipes.guess_digit.prepare --out runs/guess_digit

A game reads `guess:5>:7<:6`: the model wrote 5, 7 and 6, the environment `>:` and `<:`. The warm
start shows two ways to play: bisecting, and saying the same digit again and again. Every file is
the same on every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_model,
    make_tokenizer,
    write_missing,
    write_model,
)

PROMPT = "guess:"
VOCABULARY = [PAD, EOS, *"gues:<>", *"0123456789"]
DIGITS = range(10)
MAX_TURNS = 4
BISECTING = 0.25
NUM_GAMES = 8_000
SEED = 0
Play = Callable[[int, random.Random], list[dict[str, Any]]]


def bisect(low: int, high: int, rng: random.Random) -> int:
    """Return a middle of what is still possible; of two middles either, by chance."""
    return (low + high + rng.randint(0, 1)) // 2


def guesses(digit: int, rng: random.Random) -> Iterator[int]:
    """Yield the player's guesses in one game, up to the right one."""
    bisecting = rng.random() < BISECTING
    low, high, guess = min(DIGITS), max(DIGITS), rng.choice(DIGITS)
    for _ in range(MAX_TURNS):
        if bisecting:
            guess = bisect(low, high, rng)
        yield guess
        if guess == digit:
            return
        low, high = (guess + 1, high) if digit > guess else (low, guess - 1)


def play(digit: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return the turns of one game, each as a row: the chat so far, and the answering token.

    One row per turn, so that the warm start, too, only learns the tokens of the player.
    """
    said, rows = PROMPT, []
    for guess in guesses(digit, rng):
        rows.append({"prompt": said, "completion": [VOCABULARY.index(str(guess))]})
        said += f"{guess}{'>' if digit > guess else '<'}:"
    return rows


def draw_turns(play: Play = play) -> list[dict[str, Any]]:
    """Draw the turns of all warm-start games, as ``play`` writes them."""
    rng = random.Random(SEED)
    return [row for _ in range(NUM_GAMES) for row in play(rng.choice(DIGITS), rng)]


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, digits.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        write_model(out / "model", make_model(vocab_size=32), make_tokenizer(VOCABULARY))
    digits = [{"prompt": PROMPT, "digit": digit} for digit in DIGITS]
    write_missing(out, {"digits.jsonl": digits, "sft.jsonl": draw_turns()})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the guess-the-digit model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/guess_digit"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
