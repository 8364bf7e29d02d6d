"""Provide checks that do as they are told, for the tests of what runs them."""

import os
import time
from pathlib import Path


def good(bench, figure):
    bench.note(figure=figure, tiny=bench.tiny, third=1 / 3)


def broken(bench):
    bench.note(before=1)
    raise ValueError("a wrong value")


def two_cases(bench):
    with bench.case("first"):
        raise ValueError("the first broke")
    with bench.case("second"):
        bench.note(second="made")
    bench.require(1 + 1 == 3, "the sum is wrong")


def dies(bench):
    bench.note(before=2)
    os.kill(os.getpid(), 11)


def leaves(bench):
    os._exit(0)


def waits_for(bench, file):
    """Wait until the check after it is about to begin: its imports run meanwhile."""
    deadline = time.monotonic() + 30
    while not Path(bench.scratch, file).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.note(began=Path(bench.scratch, "began").exists())
