"""Samplers choose which older groups join the fresh ones in a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite


@dataclass(frozen=True)
class BufferEntry:
    """A group in the buffer, with the statistics that samplers need.

    ``oldest`` is the version of its oldest token, ``reward`` the mean r̄ of its G rewards and
    ``spread`` their mean absolute deviation, sum |r - r̄| / G: the mean |advantage| of GRPO before
    its division by the standard deviation.
    """

    place: int
    oldest: int
    reward: float
    spread: float


@configurable
class Sampler(ABC):
    """Chooses groups to replay. Whatever it remembers must be in its state, for an exact resume.

    Args:
        groups: maximum number of groups to add to the fresh ones of an iteration.
    """

    def __init__(self, groups: int = 8) -> None:
        require_at_least(0, groups=groups)
        self.groups = groups

    @abstractmethod
    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        """Return at most ``count`` different entries; all given ones are older than the fresh
        groups.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last choice, which are recorded as ``sample/<name>``.

        Return the same keys in every iteration, even if there was nothing to choose from.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken."""


@configurable
class FIFO(Sampler):
    """Replays each group once, first in, first out: the oldest one not replayed yet."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__(groups)
        self._last = 0

    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        chosen = [entry for entry in entries if entry.place > self._last][:count]
        if chosen:
            self._last = chosen[-1].place
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]


class _Weighted(Sampler):
    """Draws without replacement; the first draw has probabilities w / sum w, and so on."""

    @abstractmethod
    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        """Return log w of each entry, of shape (entries,); -inf for entries never to be drawn."""

    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        if not entries or count == 0:
            return []
        log_weights = self.log_weights(entries)
        # The largest of log w + Gumbel noise are such a draw (Kool et al. 2019).
        keys = log_weights + random.gumbel(size=len(entries))
        drawn = np.argsort(-keys, kind="stable")[:count]
        return [entries[i] for i in sorted(drawn) if log_weights[i] > -np.inf]


class Uniform(_Weighted):
    """Draws every group of the buffer with equal probability."""

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        return np.zeros(len(entries))


@configurable
class RewardPriority(_Weighted):
    """Prefers groups with a high mean reward r̄: w = exp(r̄ / temperature).

    Args:
        groups: see :class:`Sampler`.
        temperature: in units of reward; the smaller, the stronger the preference.
    """

    def __init__(self, groups: int = 8, temperature: float = 0.25) -> None:
        super().__init__(groups)
        require_finite(temperature=temperature)
        if temperature <= 0:
            raise ConfigError(
                f"RewardPriority(temperature={temperature}) must be > 0; the default is 0.25"
            )
        self.temperature = temperature

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        return np.array([entry.reward for entry in entries]) / self.temperature


@configurable
class AdvantagePriority(_Weighted):
    """Prefers groups with large advantages: w = spread ^ alpha (Schaul et al. 2016, with |A| as p).

    ``spread`` is the mean |r - r̄| of the group. Groups without spread are never drawn.

    Args:
        groups: see :class:`Sampler`.
        alpha: exponent of the spread; 0 draws all groups with a spread with equal probability, 1
            in proportion to it.
    """

    def __init__(self, groups: int = 8, alpha: float = 1.0) -> None:
        super().__init__(groups)
        require_at_least(0, alpha=alpha)
        require_finite(alpha=alpha)
        self.alpha = alpha

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        spread = np.array([entry.spread for entry in entries])
        positive = spread > 0
        logs = np.log(spread, where=positive, out=np.zeros_like(spread))
        return np.where(positive, self.alpha * logs, -np.inf)
