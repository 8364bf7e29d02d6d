"""Entropy bonuses: keep exploring, for as long as it helps."""

from dataclasses import dataclass

from lightning_rl.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite


@configurable
@dataclass(frozen=True)
class EntropyBonus:
    """Adds ``coef`` times the entropy per token (nats) to the objective; may be negative.

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    coef: float = 0.001

    def __post_init__(self) -> None:
        require_finite(**{"entropy.coef": self.coef})

    def at(self, iteration: int) -> float:
        """The coefficient in an iteration; override for another schedule."""
        return self.coef


@configurable
@dataclass(frozen=True)
class LinearEntropyBonus(EntropyBonus):
    """From ``coef`` to ``final`` over ``iterations`` iterations, then ``final``.

    Raises:
        ConfigError: if ``iterations`` is less than 1, or ``final`` is not finite.
    """

    final: float = 0.0
    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite(**{"entropy.final": self.final})
        if self.iterations < 1:
            raise ConfigError(f"LinearEntropyBonus(iterations={self.iterations}) must be >= 1")

    def at(self, iteration: int) -> float:
        done = min(1.0, iteration / self.iterations)
        return self.coef + (self.final - self.coef) * done
