"""Define the tasks of `benchmarks/envs`, and what each side leaves; import gymnasium and torch.

PPO, the same for all: numbers of environments and steps, networks (actor and critic apart, two
layers of 64 with tanh, orthogonal), Adam, and what the loss is made of.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from torch import Tensor

ENVS, STEPS = 8, 128
FRAMES = ENVS * STEPS
"""The frames of an iteration."""
EPS, LAMBDA, CLIP = 1e-5, 0.95, 0.2
VALUE_COEF = 0.25
"""The coefficient of the squared error; with half of it in the loss, as usual, it is 0.5."""
MAX_GRAD_NORM = 0.5
EPISODES = 20
"""The number of episodes that a trained policy is judged by."""
RECENT = 20
"""Episodes of training, over all environments, whose mean return is held against the goal."""

Policy = Callable[[Tensor], tuple[Tensor, ...]]
"""Logits (N, n), or mean (N, D) and log standard deviation (*, D), of observations (N, O)."""


@dataclass(frozen=True)
class Task:
    """An environment, and what PPO is set to there.

    Args:
        environment: gymnasium's name.
        goal: mean return of the episodes of training that count as solved.
        iterations: after which the policy is judged, in episodes apart.
        most: iterations that a run has to reach the goal.
        seeds: runs of each side, unless the command says otherwise.
        lr: learning rate.
        gamma: discount.
        epochs: passes over a batch.
        minibatches: of a pass.
        scale: on rewards, for the learner alone.
    """

    environment: str
    goal: float
    iterations: int
    most: int
    seeds: int
    lr: float = 3e-4
    gamma: float = 0.99
    epochs: int = 4
    minibatches: int = 4
    scale: float = 1.0

    def made(self) -> gymnasium.Env:
        """Make one environment; without gymnasium's checker, for no side has to pay for it."""
        return Told(gymnasium.make(self.environment, disable_env_checker=True), self.scale)


class Told(gymnasium.Wrapper):
    """Notes the return of each episode in ``returned``, which all of them share.

    Args:
        env: the environment.
        scale: on the rewards that the learner gets, not on the returns.
    """

    returned: ClassVar[list[float]] = []

    def __init__(self, env: gymnasium.Env, scale: float = 1.0) -> None:
        super().__init__(env)
        self.scale = scale
        self.total = 0.0

    def reset(self, **options: Any) -> Any:
        self.total = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        if terminated or truncated:
            self.returned.append(self.total)
        return seen, float(reward) * self.scale, terminated, truncated, info


TASKS = {
    "cartpole": Task("CartPole-v1", goal=475.0, iterations=97, most=195, seeds=20),
    "acrobot": Task("Acrobot-v1", goal=-100.0, iterations=60, most=120, seeds=10),
    "pendulum": Task(
        "Pendulum-v1",
        goal=-250.0,
        iterations=40,
        most=80,
        seeds=10,
        lr=1e-3,
        gamma=0.9,
        epochs=10,
        minibatches=16,
        scale=0.125,
    ),
}


def cpu_now() -> float:
    """Return the CPU seconds of this process and of those that it started and that are over."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Progress:
    """Measures CPU seconds of each iteration of this process, and the returns of its episodes.

    Args:
        task: whose goal ends the run, once the policy has been judged.
        policy: what is learning.
        most: iterations; None: the task's.
    """

    def __init__(self, task: Task, policy: Policy, most: int | None = None) -> None:
        self.task = task
        self.policy = policy
        self.most = most or task.most
        self.cpu_s: list[float] = []
        self.reached: int | None = None
        self.judged: list[float] = []
        self.episodes: list[list[float]] = []
        self._recent: list[float] = []

    def begin(self) -> None:
        """Begin to measure: everything before this call is set-up."""
        Told.returned.clear()
        self.setup_cpu_s = self._since = cpu_now()

    def iterated(self) -> bool:
        """Note that an iteration is over; tell whether the run is."""
        self.cpu_s.append(cpu_now() - self._since)
        done = len(self.cpu_s)
        self.episodes.append(list(Told.returned))
        self._recent = (self._recent + Told.returned)[-RECENT:]
        Told.returned.clear()
        full = len(self._recent) == RECENT
        if self.reached is None and full and np.mean(self._recent) >= self.task.goal:
            self.reached = done
        if done == min(self.task.iterations, self.most):
            self.judged = returns(self.task, self.policy, range(EPISODES))
            Told.returned.clear()
        self._since = cpu_now()
        return done == self.most or (bool(self.judged) and self.reached is not None)

    def report(self, file: str, package: str) -> None:
        """Leave a file; ``package`` is whose version is told."""
        kept = {
            "cpu_s": self.cpu_s,
            "setup_cpu_s": self.setup_cpu_s,
            "reached": self.reached,
            "episodes": self.episodes,
            "returns": self.judged,
            "version": version(package),
        }
        Path(file).write_text(json.dumps(kept))


@torch.no_grad()
def returns(task: Task, policy: Policy, seeds: Sequence[int]) -> list[float]:
    """Return the reward of an episode for each seed; actions are drawn, alike on all sides."""
    envs = [gymnasium.make(task.environment, disable_env_checker=True) for _ in seeds]
    seen = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    draws = torch.Generator().manual_seed(0)
    total, playing = [0.0] * len(envs), list(range(len(envs)))
    while playing:
        made = policy(torch.from_numpy(np.stack([seen[place] for place in playing])))
        left = []
        for place, action in zip(playing, _drawn(made, draws), strict=True):
            seen[place], reward, terminated, truncated, _ = envs[place].step(action)
            total[place] += float(reward)
            if not (terminated or truncated):
                left.append(place)
        playing = left
    return total


def _drawn(made: tuple[Tensor, ...], draws: torch.Generator) -> Sequence[Any]:
    """Draw an action for each row; the environment clips those beyond its bounds."""
    if len(made) == 1:
        drawn: list[int] = torch.multinomial(made[0].softmax(-1), 1, generator=draws)[:, 0].tolist()
        return drawn
    mean, log_std = made
    noise = torch.randn(mean.shape, generator=draws)
    return list((mean + log_std.exp() * noise).numpy())


def arguments_of(description: str | None) -> argparse.Namespace:
    """Parse the arguments of one run of one side, and limit it to one thread."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--most", type=int, help="iterations; left out: the task's")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    torch.set_num_threads(1)
    return parser.parse_args()
