"""Targets and losses for learning values from single steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite


def td_target(rewards: Tensor, following: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Return r + gamma V(s'), or r if the episode terminated; all of one shape.

    If it was truncated, at a time limit, s' has a value (Pardo et al. 2018).
    """
    # Not a product: what follows an end may be -inf, where no action is allowed, and torchrl's
    # DQNLoss, which multiplies, is NaN there.
    return rewards + gamma * torch.where(terminated, torch.zeros_like(following), following)


def greedy_value(values: Tensor, chooser: Tensor) -> Tensor:
    """Select from ``values`` (*B, n) the action that ``chooser`` (*B, n) rates best, (*B,).

    With target values and the learning network's as chooser this is double Q-learning (van Hasselt
    et al. 2016, eq. 4); with target values as both, max Q (Mnih et al. 2015).
    """
    return values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)


class TDLoss(ABC):
    """A loss of values and their targets."""

    @abstractmethod
    def __call__(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return a loss per value, of the same shape."""


class SquaredTD(TDLoss):
    """Half the squared error."""

    def __call__(self, values: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (values - targets).square()


@configurable
@dataclass(frozen=True)
class HuberTD(TDLoss):
    """Half the squared error up to ``delta``, linear beyond (Mnih et al. 2015, clipped).

    Args:
        delta: the largest slope.

    Raises:
        ConfigError: unless it is above 0.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        require_finite(delta=self.delta)
        if self.delta <= 0:
            raise ConfigError(f"HuberTD(delta={self.delta}) must be > 0")

    def __call__(self, values: Tensor, targets: Tensor) -> Tensor:
        return F.huber_loss(values, targets, reduction="none", delta=self.delta)
