"""Critic: a value head, and how it learns."""

from dataclasses import dataclass
from typing import Any

from lightning_rl.algos.losses import ValueLoss
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.models.heads import ValueHead

LEAST_LR = 1e-5
"""Default learning rate of a critic; verl's default."""


@configurable
@dataclass(frozen=True)
class Critic:
    """A value head and how it learns, for ``GAE``.

    Args:
        head: ``SharedValueHead()`` or ``SeparateValueHead()``.
        loss: the loss of its values.
        lr: learning rate of the head's own parameters; None: the optimizer's, but at least 1e-5.
        warmup_iterations: number of initial iterations in which only the critic is trained.

    Raises:
        ConfigError: for values out of range.
    """

    head: ValueHead
    loss: ValueLoss = ValueLoss()
    lr: float | None = None
    warmup_iterations: int = 0

    def __post_init__(self) -> None:
        settings = {"critic.lr": self.lr, "critic.warmup_iterations": self.warmup_iterations}
        require_finite(**settings)
        require_at_least(0, **settings)

    def least_lr(self, lr: float) -> float:
        """Return the learning rate for the head in place of the optimizer's ``lr``.

        A critic starts from nothing: the policy's small steps would not get it anywhere.
        """
        return lr if self.lr is not None or not lr else max(lr, LEAST_LR)


def as_critic(given: Any) -> Any:
    """Convert a value head to a critic with that head; return anything else unchanged."""
    return Critic(given) if isinstance(given, ValueHead) else given
