"""Test the guess-the-digit recipe: its environment, and the games that its warm start imitates."""

import random

import pytest

from lightning_rl.agents.base import Reply
from lightning_rl.rollout import Prompt
from recipes.guess_digit.environment import GuessDigit
from recipes.guess_digit.prepare import (
    DIGITS,
    MAX_TURNS,
    VOCABULARY,
    bisect,
    draw_turns,
    make_tokenizer,
    play,
)


def game(digit: int) -> GuessDigit:
    return GuessDigit(Prompt("p", "guess:", [1], {"digit": digit}))


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("6", Reply(reward=1.0, done=True)),
        ("5", Reply(">:")),
        ("7", Reply("<:")),
        *((other, Reply(done=True)) for other in ("", ":", "66", "²", "٦")),
    ],
)
def test_the_environment_says_larger_or_smaller(turn, reply):
    assert game(6).step(turn) == reply


def test_the_warm_start_shows_what_the_environment_would_say():
    tokenizer = make_tokenizer(VOCABULARY)
    rng = random.Random(1)
    for _ in range(300):
        digit = rng.choice(DIGITS)
        environment, said = game(digit), "guess:"
        rows = play(digit, rng)
        for number, row in enumerate(rows):
            assert row["prompt"] == said
            assert tokenizer.decode(tokenizer(said)["input_ids"]) == said  # all of it is known
            guess = tokenizer.decode(row["completion"])
            reply = environment.step(guess)
            assert reply.done == (number == len(rows) - 1 and guess == str(digit))
            said += guess + reply.observation
        assert len(rows) <= MAX_TURNS


@pytest.mark.parametrize("digit", DIGITS)
def test_bisecting_always_hits_in_time(digit):
    for seed in range(50):
        rng, low, high = random.Random(seed), 0, 9
        for _ in range(MAX_TURNS):
            guess = bisect(low, high, rng)
            if guess == digit:
                break
            low, high = (guess + 1, high) if guess < digit else (low, guess - 1)
        assert guess == digit


def test_the_warm_start_wins_about_a_third():
    rng = random.Random(0)
    digits = [rng.choice(DIGITS) for _ in range(4_000)]
    last_words = [play(digit, rng)[-1]["completion"] for digit in digits]
    hits = [word == [VOCABULARY.index(str(d))] for word, d in zip(last_words, digits, strict=True)]
    # Bisecting, a quarter of the games, always hits; repeating hits one of ten digits.
    expected = 0.25 + 0.75 * 0.1
    assert sum(hits) / 4_000 == pytest.approx(expected, abs=0.03)  # four standard deviations


def test_all_games_are_there_turn_by_turn():
    rows = draw_turns()
    assert sum(row["prompt"] == "guess:" for row in rows) == 8_000
    assert max(len(row["prompt"]) for row in rows) == len("guess:5>:5>:5>:")
