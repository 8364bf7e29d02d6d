"""What all sides of `benchmarks/envs.py` train on, measure and leave; imports gymnasium and torch.

PPO on CartPole-v1, the same for all: numbers of environments and steps, networks (actor and critic
apart, two layers of 64 with tanh, orthogonal), Adam, and what the loss is made of.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor

ENVIRONMENT = "CartPole-v1"
ENVS, STEPS = 8, 128
FRAMES = ENVS * STEPS
"""Of an iteration."""
EPOCHS, MINIBATCHES = 4, 4
LR, EPS = 3e-4, 1e-5
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
VALUE_COEF = 0.25
"""Of the squared error; with half of it in the loss, as most write it, the coefficient is 0.5."""
MAX_GRAD_NORM = 0.5
EPISODES = 20
"""That a trained policy is judged by."""

Policy = Callable[[Tensor], Tensor]
"""Logits (N, 2) of observations (N, 4)."""


def made() -> gymnasium.Env:
    """One environment; without gymnasium's checker, for no side has to pay for it."""
    return gymnasium.make(ENVIRONMENT, disable_env_checker=True)


def cpu_now() -> float:
    """CPU seconds of this process and of those that it started and that are over."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Progress:
    """CPU seconds of each iteration of this process."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def begin(self) -> None:
        """All before this is set-up."""
        self.setup_cpu_s = self._since = cpu_now()

    def iterated(self) -> None:
        """An iteration is over."""
        now = cpu_now()
        self.cpu_s.append(now - self._since)
        self._since = now

    def report(self, file: str, policy: Policy, package: str) -> None:
        """Judge the policy, and leave a file; ``package`` is whose version is told."""
        kept = {
            "cpu_s": self.cpu_s,
            "setup_cpu_s": self.setup_cpu_s,
            "returns": returns(policy, range(EPISODES)),
            "version": version(package),
        }
        Path(file).write_text(json.dumps(kept))


@torch.no_grad()
def returns(policy: Policy, seeds: Sequence[int]) -> list[float]:
    """The reward of an episode for each seed; actions are drawn, alike on all sides."""
    envs = [made() for _ in seeds]
    seen = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    draws = torch.Generator().manual_seed(0)
    total, playing = [0.0] * len(envs), list(range(len(envs)))
    while playing:
        logits = policy(torch.from_numpy(np.stack([seen[place] for place in playing])))
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=draws).flatten().tolist()
        left = []
        for place, action in zip(playing, drawn, strict=True):
            seen[place], reward, terminated, truncated, _ = envs[place].step(action)
            total[place] += float(reward)
            if not (terminated or truncated):
                left.append(place)
        playing = left
    return total


def arguments_of(description: str | None) -> argparse.Namespace:
    """What one run of one side takes; a thread is all that it gets."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name in ("--iterations", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", required=True)
    torch.set_num_threads(1)
    return parser.parse_args()
