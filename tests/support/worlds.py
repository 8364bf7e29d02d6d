"""Small gymnasium environments in which everything can be calculated by hand, or goes wrong."""

import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces

released = threading.Event()
"""Lets environments of this process that hang go on."""


class Walk(gymnasium.Env):
    """Steps on a line, right (1) or left (0), from a place that the seed draws.

    What is seen is the place, and what it was before the last step. A step costs 1, and the end
    at 5 earns 5; the episode is cut after 8 steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    end, limit = 5, 8

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.before = int(self.np_random.integers(-2, 3))
        self.steps = 0
        return self.seen(), {}

    def seen(self):
        return np.array([self.place, self.before], np.float32)

    def step(self, action):
        self.before, self.steps = self.place, self.steps + 1
        self.place += 1 if action == 1 else -1
        over = self.place >= self.end
        reward = 5.0 * over - 1.0
        return self.seen(), reward, over, not over and self.steps >= self.limit, {}


class Reused(Walk):
    """Shows one and the same array, with other numbers in it each time."""

    def seen(self):
        vars(self).setdefault("shown", np.zeros(2, np.float32))[:] = super().seen()
        return self.shown


class Remember(Walk):
    """Rewards what was shown at the begin alone: a body without memory cannot know."""

    limit = 4

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.wanted, self.steps = int(self.np_random.integers(0, 2)), 0
        return self.seen(), {}

    def seen(self):
        shown = (1.0 if self.wanted else -1.0) if self.steps == 0 else 0.0
        return np.array([shown, 0.0], np.float32)

    def step(self, action):
        self.steps += 1
        return self.seen(), float(action == self.wanted), False, self.steps >= self.limit, {}


class Faulty(Walk):
    """Goes wrong in the given step of an episode: ``raises``, ``nan``, ``hangs`` or ``forgets``."""

    def __init__(self, how: str, at: int = 3):
        self.how, self.at = how, at

    def reset(self, *, seed=None, options=None):
        seen = super().reset(seed=seed, options=options)
        if self.how == "forgets":
            self.place = int(time.time_ns() % 5) - 2  # not the seed's
            self.limit = 3 + int(time.time_ns() // 7 % 5)
        return seen

    def step(self, action):
        result = super().step(action)
        if self.steps == self.at and self.how == "raises":
            raise ValueError("the simulator is gone")
        if self.steps == self.at and self.how == "nan":
            return np.array([np.nan, 0], np.float32), *result[1:]
        if self.steps == self.at and self.how == "hangs":
            released.wait(60)
        return result


class Reach(gymnasium.Env):
    """A bandit of two numbers: the closer to (0.5, -0.5), the better; one step."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        away = float(((np.asarray(action) - np.array([0.5, -0.5])) ** 2).sum())
        return np.zeros(1, np.float32), -away, True, False, {}


class Switches(gymnasium.Env):
    """Observations in a dictionary, one of them a number of four, and actions of several kinds."""

    observation_space = spaces.Dict(
        {"level": spaces.Box(0, 255, (2, 2), np.uint8), "sign": spaces.MultiBinary(3)}
    )

    def __init__(self, actions: str = "several"):
        kinds = {"several": spaces.MultiDiscrete([2, 3]), "binary": spaces.MultiBinary(2)}
        self.action_space = kinds[actions]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


for name in ("Walk", "Reused", "Remember", "Faulty", "Reach", "Switches"):
    gymnasium.register(f"{name}-v0", f"{__name__}:{name}")
