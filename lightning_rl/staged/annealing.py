"""Annealing: a share that changes with the iteration."""

from abc import ABC, abstractmethod

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least


class Annealing(ABC):
    """A share in [0, 1] for each iteration."""

    @abstractmethod
    def share(self, iteration: int) -> float:
        """The share in an iteration, which is counted from 0."""


@configurable
class ConstantShare(Annealing):
    """The same share in all iterations.

    Args:
        start: the share.

    Raises:
        ConfigError: for one outside [0, 1].
    """

    def __init__(self, start: float = 0.0) -> None:
        self.start = _share(start=start)

    def share(self, iteration: int) -> float:
        return self.start


@configurable
class LinearShare(Annealing):
    """Falls by the same amount in each iteration: start (1 - t / iterations), then 0.

    Args:
        start: the share in iteration 0.
        iterations: t from which it is 0.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(self, start: float = 1.0, iterations: int = 10) -> None:
        require_at_least(1, iterations=iterations)
        self.start = _share(start=start)
        self.iterations = iterations

    def share(self, iteration: int) -> float:
        return self.start * max(0.0, 1 - iteration / self.iterations)


@configurable
class ExponentialShare(Annealing):
    """Is multiplied by the same factor in each iteration: start x decay^t.

    Args:
        start: the share in iteration 0.
        decay: the factor.

    Raises:
        ConfigError: for values outside [0, 1].
    """

    def __init__(self, start: float = 1.0, decay: float = 0.5) -> None:
        self.start = _share(start=start)
        self.decay = _share(decay=decay)

    def share(self, iteration: int) -> float:
        return float(self.start * self.decay**iteration)


def _share(**named: float) -> float:
    [(name, value)] = named.items()
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} must be in [0, 1]")
    return value
