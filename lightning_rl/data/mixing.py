"""Decides which of several prompt sets the next group is drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite

_STREAM = 1
"""Separates these random numbers from those of a set's own order."""


class Mixing(ABC):
    """Chooses a set for every group, using only state that a checkpoint holds.

    All ranks ask for the same draws, and observe the same groups between them, so that they choose
    alike.
    """

    @abstractmethod
    def choose(self, weights: Sequence[float], drawn: Sequence[int], seed: int) -> int:
        """Return the number of the set to draw from next.

        Args:
            weights: weights of the sets, all above 0.
            drawn: number of prompts drawn from each set so far.
            seed: seed of the mixture.
        """

    def shares(self, weights: Sequence[float]) -> list[float]:
        """Return the expected share of each set in the groups to come; they sum to 1."""
        return [weight / fsum(weights) for weight in weights]

    def observe(
        self, rewards: Sequence[Sequence[Sequence[float]]], bars: Sequence[float | None]
    ) -> None:
        """Learn from a graded iteration; by default nothing.

        Args:
            rewards: for each set, the rewards of each of its graded groups.
            bars: for each set, the reward from which a rollout is right, if it has one.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as primitives."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class FixedWeights(Mixing):
    """Draws each group's set at random, with probability proportional to its weight.

    Draw number i is decided by the seed and i alone.
    """

    def choose(self, weights: Sequence[float], drawn: Sequence[int], seed: int) -> int:
        # Stateless, so that a resumed run draws the same.
        random = np.random.default_rng([seed, sum(drawn), _STREAM])
        return int(random.choice(len(weights), p=self.shares(weights)))


class RoundRobin(Mixing):
    """Draws from the set that lags furthest behind its share, without randomness.

    Before draw i (from 0), set s lags by (i + 1) w_s / (sum of all w) - (prompts drawn from it);
    the first of equal ones is drawn. Equal weights give turns; weights 2 and 1 give a, b, a, a, b,
    a,
    ...
    """

    def choose(self, weights: Sequence[float], drawn: Sequence[int], seed: int) -> int:
        due = (sum(drawn) + 1) / fsum(weights)
        lags = [due * weight - count for weight, count in zip(weights, drawn, strict=True)]
        return lags.index(max(lags))


@configurable
class ByPassRate(FixedWeights):
    """Draws more from sets whose groups are neither all right nor all wrong, as these teach most.

    A set is drawn with probability proportional to w (floor + (1 - floor) u). w is its weight, and
    u estimates the share of its groups with 0 < pass rate < 1: it starts at 1, and after each
    iteration with graded groups of the set u <- memory u + (1 - memory) (share in it). No set
    falls below ``floor`` times the share that its weight alone would give it.

    Args:
        floor: in (0, 1].
        memory: how slowly u follows, in [0, 1).
        success_reward: a rollout with at least this reward passed, in sets without a bar of their
            own.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self, floor: float = 0.1, memory: float = 0.8, success_reward: float = 1.0
    ) -> None:
        require_finite(success_reward=success_reward)
        if not (0 < floor <= 1 and 0 <= memory < 1):
            raise ConfigError(
                f"ByPassRate(floor={floor}, memory={memory}): need floor in (0, 1] and memory in "
                "[0, 1)"
            )
        self.floor = floor
        self.memory = memory
        self.success_reward = success_reward
        self.mixed: list[float] = []
        """Estimated u of every set; empty before the first iteration."""

    def shares(self, weights: Sequence[float]) -> list[float]:
        mixed = self.mixed or [1.0] * len(weights)
        return super().shares(
            [
                weight * (self.floor + (1 - self.floor) * share)
                for weight, share in zip(weights, mixed, strict=True)
            ]
        )

    def observe(
        self, rewards: Sequence[Sequence[Sequence[float]]], bars: Sequence[float | None]
    ) -> None:
        before = self.mixed or [1.0] * len(rewards)
        self.mixed = [
            self._follow(old, groups, self.success_reward if bar is None else bar)
            for old, groups, bar in zip(before, rewards, bars, strict=True)
        ]

    def _follow(self, old: float, groups: Sequence[Sequence[float]], bar: float) -> float:
        if not groups:
            return old
        mixed = sum(min(rewards) < bar <= max(rewards) for rewards in groups)
        return self.memory * old + (1 - self.memory) * mixed / len(groups)

    def state_dict(self) -> dict[str, Any]:
        return {"mixed": self.mixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mixed = list(state["mixed"])
