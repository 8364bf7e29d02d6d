"""Define seven tasks of arithmetic and reading that a small chat model gets right now and then.

A question is drawn by a seed. Its *facts* (the two factors, the four numbers, the word) decide
whether it is held out: what a model is examined on, it has met in no other order or words.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from lightning_rl.rollout import Message, last_text

HELD_OUT = 4
"""One in so many facts is held out."""
ASKED = "Answer with the number only."

_PRODUCT = (
    "What is {} times {}?",
    "What is {} x {}?",
    "What is {} multiplied by {}?",
    "Multiply {} by {}.",
    "Calculate {} * {}.",
    "What is the product of {} and {}?",
    "Work out {} times {}.",
    "How much is {} times {}?",
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Ida", "Jack")
_THINGS = ("apples", "books", "coins", "shells", "stamps", "marbles", "pencils", "cards")
_WORDS = """
    almond amber anchor apple arrow autumn balloon banana barrel basket bottle bridge bubble butter
    button cabbage camera candle canyon carpet castle cheese cherry coffee copper cotton cradle
    dinner dragon dollar engine feather fellow finger flower forest funnel garden giraffe glitter
    grammar guitar hammer harbor helmet hollow insect island jacket jungle kettle kitten ladder
    lantern lemon letter lizard magnet mammal meadow mirror monkey muffin narrow needle nettle
    ocean onion orange oyster paddle papaya pepper pillow pirate pocket potato puddle puzzle
    rabbit raccoon ribbon river rocket saddle salmon school scissors shadow silver spoon squirrel
    street summer supper sunset teapot temple ticket tomato tunnel turtle valley velvet village
    violin walnut water wheel whistle willow window winter yellow zipper
"""


@dataclass(frozen=True)
class Question:
    """Holds a question's text, the right number, and the values that both are made of."""

    text: str
    answer: int
    facts: Sequence[Any]

    @property
    def held_out(self) -> bool:
        return blake2b(repr(self.facts).encode()).digest()[0] % HELD_OUT == 0


def products(rng: random.Random) -> Question:
    """Ask for the product of two numbers from 2 to 9."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return Question(rng.choice(_PRODUCT).format(a, b), a * b, sorted((a, b)))


def largest(rng: random.Random) -> Question:
    """Ask for the largest of four numbers below 50."""
    numbers = rng.sample(range(50), 4)
    text = f"Which is the largest of these numbers: {', '.join(map(str, numbers))}?"
    return Question(text, max(numbers), sorted(numbers))


def smallest(rng: random.Random) -> Question:
    """Ask for the smallest of four numbers below 50."""
    numbers = rng.sample(range(50), 4)
    text = f"Which is the smallest of these numbers: {', '.join(map(str, numbers))}?"
    return Question(text, min(numbers), sorted(numbers))


def letters(rng: random.Random) -> Question:
    """Ask how often a letter occurs in a word that has it."""
    word = rng.choice(_WORDS.split())
    letter = rng.choice(sorted(set(word)))
    text = f'How many times does the letter "{letter}" occur in the word "{word}"?'
    return Question(text, word.count(letter), [word])


def sums(rng: random.Random) -> Question:
    """Ask for the sum of two numbers below 60."""
    a, b = rng.randint(1, 59), rng.randint(1, 59)
    return Question(f"What is {a} + {b}?", a + b, sorted((a, b)))


def stories(rng: random.Random) -> Question:
    """Ask in a story for the sum of two numbers below 60."""
    a, b = rng.randint(2, 59), rng.randint(2, 59)
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    text = f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?"
    return Question(text, a + b, sorted((a, b)))


def differences(rng: random.Random) -> Question:
    """Ask for the difference of two numbers below 60, the larger one first."""
    b, a = sorted(rng.sample(range(1, 60), 2))
    return Question(f"What is {a} - {b}?", a - b, [a, b])


TASKS: dict[str, Callable[[random.Random], Question]] = {
    task.__name__: task
    for task in (products, largest, letters, sums, stories, differences, smallest)
}


def questions(task: str, held_out: bool, seed: int = 0) -> Iterator[Question]:
    """Yield questions of a task without repetition, until there are hardly any others."""
    rng = random.Random(f"{task} {seed}")
    seen: set[str] = set()
    drawn = 0
    while drawn < 100 * (len(seen) + 10):
        drawn += 1
        question = TASKS[task](rng)
        if question.held_out == held_out and question.text not in seen:
            seen.add(question.text)
            yield question


def last_number(completions: Sequence[str | list[Message]], answer: Sequence[int]) -> list[float]:
    """Score 1 where the last number of a completion is the answer, else 0."""
    said = (last_text(completion).replace(",", "") for completion in completions)
    found = (re.findall(r"-?\d+(?:\.\d+)?", text) for text in said)
    return [
        float(bool(numbers) and float(numbers[-1]) == right)
        for numbers, right in zip(found, answer, strict=True)
    ]
