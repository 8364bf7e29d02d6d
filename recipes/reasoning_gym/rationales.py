"""How each task is worked out, in short sentences that a small model can learn to write.

A rationale is made from the entry that reasoning-gym's verifier reads, and ends right before the
answer.
"""

import re
from collections.abc import Callable
from math import gcd
from typing import Any

from reasoning_gym.arithmetic.leg_counting import ANIMALS

Entry = dict[str, Any]


def chain_sum(entry: Entry) -> str:
    """``15 - 43 = -28, -28 - 75 = -103``: from left to right."""
    first, *rest = entry["metadata"]["expression"].split()
    steps, total = [], int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(f"{sign}{term}")
        steps.append(f"{before} {sign} {term} = {total}")
    return ", ".join(steps)


def leg_counting(entry: Entry) -> str:
    """``5 ants have 30 legs, 2 birds have 4 legs, 30 + 4 = 34``."""
    counts = entry["metadata"]["animals"]
    legs = [number * ANIMALS[animal] for animal, number in counts.items()]
    each = [
        f"{number} {animal}s have {many} legs" if number > 1 else f"1 {animal} has {many} legs"
        for (animal, number), many in zip(counts.items(), legs, strict=True)
    ]
    total = [f"{' + '.join(map(str, legs))} = {sum(legs)}"] if len(legs) > 1 else []
    return ", ".join([*each, *total])


def letter_counting(entry: Entry) -> str:
    """``t h e, s e a: e e``: the words spelled out, then the letter as often as it was seen."""
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    spelled = ", ".join(" ".join(word.lower()) for word in words)
    seen = " ".join(letter for character in "".join(words).lower() if character == letter)
    return f"{spelled}: {seen or 'none'}"


def spell_backward(entry: Entry) -> str:
    """``t o n e, e n o t``."""
    word = entry["metadata"]["word"]
    return f"{' '.join(word)}, {' '.join(reversed(word))}"


def greatest_common_divisor(entry: Entry) -> str:
    """``26 by 20 leaves 6, 20 by 6 leaves 2, 6 by 2 leaves 0``: Euclid's."""
    small, large = sorted(entry["metadata"]["numbers"])
    steps = []
    while small:
        steps.append(f"{large} by {small} leaves {large % small}")
        large, small = small, large % small
    return ", ".join(steps)


def count_bits(entry: Entry) -> str:
    """``13 odd, 6, 3 odd, 1 odd``: halved until nothing is left; every odd number is a 1 bit."""
    number, steps = entry["metadata"]["number"], []
    while number:
        steps.append(f"{number} odd" if number % 2 else str(number))
        number //= 2
    return ", ".join(steps)


def fraction_simplification(entry: Entry) -> str:
    """``2 divides both, 6 / 2 = 3, 20 / 2 = 10``."""
    top, bottom = entry["metadata"]["numerator"], entry["metadata"]["denominator"]
    common = gcd(top, bottom)
    halves = [f"{number} / {common} = {number // common}" for number in (top, bottom)]
    return ", ".join([f"{common} divides both", *halves])


def simple_equations(entry: Entry) -> str:
    """``-8*e = -51 - 5 = -56, e = -56 / -8 = 7``."""
    name = entry["metadata"]["variable"]
    left, right = entry["metadata"]["equation"].split(" = ")
    factor = constant = 0
    for term in re.findall(r"[+-]?[^+-]+", left.replace(" ", "")):
        if name in term:
            number = term.replace(f"*{name}", "").replace(name, "1")
            factor += int(number)
        else:
            constant += int(term)
    rest = int(right) - constant
    sign = "-" if constant > 0 else "+"
    moved = f"{right} {sign} {abs(constant)} = {rest}" if constant else right
    return f"{factor}*{name} = {moved}, {name} = {rest} / {factor} = {rest // factor}"


RATIONALES: dict[str, Callable[[Entry], str]] = {
    "chain_sum": chain_sum,
    "leg_counting": leg_counting,
    "letter_counting": letter_counting,
    "spell_backward": spell_backward,
    "gcd": greatest_common_divisor,
    "count_bits": count_bits,
    "fraction_simplification": fraction_simplification,
    "simple_equations": simple_equations,
}
