"""When to sync: one predicate to override."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SyncState:
    """What a schedule may look at: versions count iterations trained."""

    trainer_version: int
    engine_version: int


class SyncSchedule(ABC):
    """Asked after every iteration."""

    @abstractmethod
    def should_sync(self, state: SyncState) -> bool:
        """True to push now. (Before the first iteration a push always happens.)"""


@dataclass(frozen=True)
class FixedSchedule(SyncSchedule):
    """Push every ``every_n_iterations`` iterations.

    Raises:
        ConfigError: if that is less than 1.
    """

    every_n_iterations: int = 1

    def __post_init__(self) -> None:
        if self.every_n_iterations < 1:
            raise ConfigError(f"every_n_iterations={self.every_n_iterations} must be >= 1")

    def should_sync(self, state: SyncState) -> bool:
        return state.trainer_version - state.engine_version >= self.every_n_iterations
