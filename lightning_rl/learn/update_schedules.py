"""Update schedules decide in which iterations an agent learns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least


class UpdateSchedule(ABC):
    """Decides whether an agent learns in an iteration; in the others it only acts."""

    @abstractmethod
    def due(self, iteration: int) -> bool:
        """Return True if the agent learns in this iteration, counted from 0."""

    def count(self, iterations: int) -> int:
        """Return in how many of the first iterations it learns; calls ``due`` for each of them."""
        return sum(map(self.due, range(iterations)))


@dataclass(frozen=True)
class EveryIteration(UpdateSchedule):
    """Learns in every iteration."""

    def due(self, iteration: int) -> bool:
        return True

    def count(self, iterations: int) -> int:
        return iterations


@configurable
@dataclass(frozen=True)
class Periodic(UpdateSchedule):
    """Learns in every N-th iteration.

    Args:
        every: N, the number of iterations from one update to the next.
        first: the first iteration in which it learns.

    Raises:
        ConfigError: for ``every`` below 1 or ``first`` below 0.
    """

    every: int = 2
    first: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, every=self.every)
        require_at_least(0, first=self.first)

    def due(self, iteration: int) -> bool:
        return iteration >= self.first and (iteration - self.first) % self.every == 0

    def count(self, iterations: int) -> int:
        return max(0, (iterations - self.first + self.every - 1) // self.every)


@configurable
@dataclass(frozen=True)
class Alternating(UpdateSchedule):
    """Agents learn in turns, for a number of iterations each.

    Args:
        iterations: iterations per turn.
        turn: index of this agent's turn, from 0.
        turns: number of agents, or sets of agents, that take turns.

    Raises:
        ConfigError: for values below 1, or a ``turn`` outside [0, turns).
    """

    iterations: int = 1
    turn: int = 0
    turns: int = 2

    def __post_init__(self) -> None:
        require_at_least(1, iterations=self.iterations, turns=self.turns)
        if not 0 <= self.turn < self.turns:
            raise ConfigError(f"Alternating(turn={self.turn}) must be in [0, turns={self.turns})")

    def due(self, iteration: int) -> bool:
        return iteration // self.iterations % self.turns == self.turn

    def count(self, iterations: int) -> int:
        rounds, rest = divmod(iterations, self.iterations * self.turns)
        begun = rest - self.turn * self.iterations
        return rounds * self.iterations + min(max(0, begun), self.iterations)
