"""AdaptiveKL: a penalty for leaving the policy that collected a batch."""

import math
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite


@configurable
class AdaptiveKL:
    """Adds ``value`` x KL(old || new) per step to the loss (Schulman et al. 2017, PPO, section 4).

    After an iteration ``value`` is doubled if its mean KL was above 1.5 x ``target``, and halved if
    it was below ``target`` / 1.5. With ``loss: Surrogate`` it is PPO without a clip.

    Args:
        value: to start with.
        target: mean KL in nats; None: ``value`` stays.

    Raises:
        ConfigError: unless both are positive and finite.
    """

    def __init__(self, value: float = 1.0, target: float | None = 0.01) -> None:
        require_finite(value=value, target=target)
        if value <= 0 or (target is not None and target <= 0):
            raise ConfigError(f"AdaptiveKL(value={value}, target={target}): both must be > 0")
        self.value = value
        self.target = target

    def update(self, measured: float) -> None:
        """Called once per iteration, with its mean KL."""
        if self.target is None or not math.isfinite(measured):
            return
        if measured > 1.5 * self.target:
            self.value *= 2
        elif measured < self.target / 1.5:
            self.value /= 2

    def state_dict(self) -> dict[str, Any]:
        """The present value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.value = state["value"]
