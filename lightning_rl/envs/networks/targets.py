"""How a target network follows the learning one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least


# torchrl's updaters need its loss modules; SoftUpdate leaves a network's buffers as they were, and
# HardUpdate(n) copies after every n + 1 updates.
class TargetUpdate(ABC):
    """Moves a target network towards the learning one, after each of its updates."""

    @abstractmethod
    def __call__(self, target: nn.Module, source: nn.Module, updates: int) -> None:
        """Move the target; ``source`` has had ``updates`` updates by now."""


@configurable
@dataclass(frozen=True)
class Polyak(TargetUpdate):
    """A moving average: target <- (1 - tau) target + tau source (Lillicrap et al. 2016).

    Args:
        tau: weight of the source.

    Raises:
        ConfigError: unless ``tau`` is in (0, 1].
    """

    tau: float = 0.005

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise ConfigError(f"Polyak(tau={self.tau}) must be in (0, 1]")

    @torch.no_grad()
    def __call__(self, target: nn.Module, source: nn.Module, updates: int) -> None:
        ours: list[Tensor] = list(target.parameters())
        theirs: list[Tensor] = list(source.parameters())
        torch._foreach_lerp_(ours, theirs, self.tau)
        for own, other in zip(target.buffers(), source.buffers(), strict=True):
            own.copy_(other)


@configurable
@dataclass(frozen=True)
class CopyEvery(TargetUpdate):
    """Copies the source after every so many updates (Mnih et al. 2015).

    Args:
        updates: number of updates between copies.

    Raises:
        ConfigError: for ``updates`` below 1.
    """

    updates: int = 500

    def __post_init__(self) -> None:
        require_at_least(1, updates=self.updates)

    @torch.no_grad()
    def __call__(self, target: nn.Module, source: nn.Module, updates: int) -> None:
        if updates % self.updates == 0:
            target.load_state_dict(source.state_dict())
