"""Provide gymnasium environments that do what they should not, for tests and hostile calls."""

import ctypes
import os
import signal
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.support.worlds import Walk

released = threading.Event()
"""Lets environments of this process that hang go on."""


def exits(*arguments):
    raise SystemExit(0)


def raises(*arguments):
    raise ValueError("the simulator is gone")


def hangs(*arguments):
    released.wait(600)


def sleeps(*arguments):
    time.sleep(600)  # which nothing in this process ends


DEEDS = {
    "exits": exits,
    "raises": raises,
    "hangs": hangs,
    "sleeps": sleeps,
    "ends the process": lambda *_: os._exit(0),
    "kills": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "interrupts": lambda *_: signal.raise_signal(signal.SIGINT),
    "sets an alarm": lambda *_: signal.signal(signal.SIGALRM, signal.SIG_DFL),
    "crashes": lambda *_: ctypes.string_at(0),
    "ignores signals": lambda *_: [hangs() for _ in iter(int, 1)],
}
ANSWERS = {
    "nothing": lambda answer: None,
    "old": lambda answer: answer[0] if len(answer) == 2 else answer[:4],
    "long": lambda answer: (np.zeros(3, np.float32), *answer[1:]),
    "short": lambda answer: (np.zeros(1, np.float32), *answer[1:]),
    "ragged": lambda answer: ([[1.0], [1.0, 2.0]], *answer[1:]),
    "text": lambda answer: ("here", *answer[1:]),
    "nan": lambda answer: (np.array([np.nan, 0], np.float32), *answer[1:]),
    "unpaid": lambda answer: (answer[0], None, *answer[2:]),
    "paid nan": lambda answer: (answer[0], float("nan"), *answer[2:]),
    "paid in text": lambda answer: (answer[0], "much", *answer[2:]),
    "paid too much": lambda answer: (answer[0], 10**400, *answer[2:]),
    "not over": lambda answer: (*answer[:2], None, *answer[3:]),
    "over twice": lambda answer: (*answer[:2], np.ones(2, bool), *answer[3:]),
    "not cut": lambda answer: (*answer[:3], "no", *answer[4:]),
    "paid twice": lambda answer: (answer[0], np.ones(2), *answer[2:]),
}


class Rude(Walk):
    """A walk on which something is done, or answered, that should not be.

    Args:
        how: one of ``DEEDS`` or ``ANSWERS``.
        where: ``init``, ``reset``, ``step`` or ``close``.
        at: in which step of an episode.
    """

    def __init__(self, how: str, where: str = "step", at: int = 3):
        self.how, self.where, self.at, self.steps = how, where, at, 0
        self._do("init")

    def _do(self, where, answer=None):
        due = where == self.where and (where != "step" or self.steps == self.at)
        if due and self.how in ANSWERS:
            return ANSWERS[self.how](answer)
        if due:
            DEEDS[self.how]()
        return answer

    def reset(self, *, seed=None, options=None):
        return self._do("reset", super().reset(seed=seed, options=options))

    def step(self, action):
        return self._do("step", super().step(action))

    def close(self):
        self._do("close")


class Odd(Walk):
    """Says of itself what cannot be."""

    def __init__(self, how: str):
        if how == "shows nothing":
            self.observation_space = None
        elif how == "does nothing":
            self.action_space = "left or right"
        elif how == "shows text":
            self.observation_space = spaces.Text(5)
        elif how == "shows bytes":
            self.observation_space = spaces.Box(0, 255, (2,), np.uint8)
        elif how == "shows a choice":
            self.observation_space = spaces.Discrete(3)


for name in ("Rude", "Odd"):
    gymnasium.register(f"{name}-v0", f"{__name__}:{name}")
