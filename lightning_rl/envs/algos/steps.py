"""Advantages of steps in environments: pure functions of (E, T, *A), and classes over them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError


@dataclass(frozen=True)
class Steps:
    """The inputs of an advantage, for one agent.

    Args:
        rewards: (E, T, *A).
        values: (E, T, *A), of the observation before each step.
        next_values: (E, T, *A), of the observation after it, also where an episode was truncated.
        terminated: (E, T), True if the episode ended by itself: nothing follows.
        done: (E, T), True if it terminated or was truncated: the next step belongs to another.
    """

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    done: Tensor


def step_gae(steps: Steps, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets, both (E, T, *A).

    delta_t = r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t); A_t = delta_t + gamma lam (1 -
    done_t) A_{t+1} (Schulman et al. 2015, GAE, eqs. 11 and 16).
    """
    live, goes_on = _expanded(~steps.terminated, steps), _expanded(~steps.done, steps)
    delta = steps.rewards + gamma * live * steps.next_values - steps.values
    advantages = _discounted(delta, gamma * lam * goes_on)
    return advantages, advantages + steps.values


def reward_to_go(steps: Steps, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each step on, (E, T, *A).

    G_t = r_t + gamma G_{t+1} within an episode (Sutton and Barto 2018, eq. 3.9). A truncated
    episode is continued with the value of its last observation.
    """
    live, goes_on = _expanded(~steps.terminated, steps), _expanded(~steps.done, steps)
    # What no step of the batch follows is its last, and where an episode was cut.
    cut = live * (1 - goes_on)
    cut[:, -1] = live[:, -1]
    return _discounted(steps.rewards + gamma * cut * steps.next_values, gamma * goes_on)


def _expanded(flags: Tensor, steps: Steps) -> Tensor:
    shape = (*flags.shape, *[1] * (steps.rewards.ndim - 2))
    return flags.reshape(shape).to(steps.rewards.dtype)


def _discounted(values: Tensor, factors: Tensor) -> Tensor:
    """Compute x_t = value_t + factor_t x_{t+1}, from the last step backwards."""
    # numpy's calls cost a tenth of torch's, and there are two per step.
    rows, weights = values.transpose(0, 1).cpu().numpy(), factors.transpose(0, 1).cpu().numpy()
    summed = np.array(rows)
    for step in range(len(rows) - 2, -1, -1):
        summed[step] += weights[step] * summed[step + 1]
    return torch.from_numpy(summed).transpose(0, 1).to(values.device)


@configurable
@dataclass(frozen=True)
class StepAdvantage(ABC):
    """Computes advantages and value targets of an agent's steps.

    Args:
        gamma: discount per step.
        normalize: give a batch's advantages mean 0 and standard deviation 1, over all ranks,
            separately for each agent.

    Raises:
        ConfigError: unless ``gamma`` is in [0, 1].
    """

    gamma: float = 0.99
    normalize: bool = True
    needs_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"{type(self).__name__}(gamma={self.gamma}) must be in [0, 1]")

    @abstractmethod
    def __call__(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return advantages, not normalised, and value targets; both (E, T, *A)."""


@configurable
@dataclass(frozen=True)
class StepGAE(StepAdvantage):
    """Generalised advantage estimation (Schulman et al. 2015).

    Args:
        lam: 0 relies on the critic, 1 on the observed rewards.

    Raises:
        ConfigError: unless ``lam`` is in [0, 1].
    """

    lam: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"StepGAE(lam={self.lam}) must be in [0, 1]")

    def __call__(self, steps: Steps) -> tuple[Tensor, Tensor]:
        return step_gae(steps, self.gamma, self.lam)


@configurable
@dataclass(frozen=True)
class StepReturn(StepAdvantage):
    """REINFORCE: the return from a step on, minus the critic's value of it.

    Args:
        baseline: subtract the value; False: no critic is needed, and a truncated episode's future
            rewards count as zero.
    """

    baseline: bool = True

    @property
    def needs_values(self) -> bool:  # type: ignore[override]
        return self.baseline

    def __call__(self, steps: Steps) -> tuple[Tensor, Tensor]:
        targets = reward_to_go(steps, self.gamma)
        return targets - steps.values if self.baseline else targets, targets
