"""Hostile calls: programs that attack what runs them, between right ones."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from benchmarks.hostile.attacks import ATTACKS, HONEST, TESTS
from benchmarks.hostile.call import Call
from lightning_rl.rewards.rules import PythonTests


def beside(attack: str) -> Callable[[Path], object]:
    """The attack between three right programs, in one worker."""

    def play(folder: Path) -> None:
        pool = PythonTests(workers=1, timeout_s=60)
        programs = [HONEST, attack, HONEST, HONEST]
        scores = asyncio.run(pool(completions=programs, tests=[TESTS] * 4))
        pool.close()
        print(scores)

    return play


CALLS = [
    Call(name, beside(attack), ("[1.0, 0.0, 1.0, 1.0]",), right=True, seconds=300.0)
    for name, attack in ATTACKS.items()
]
