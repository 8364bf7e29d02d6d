"""When to sync: one predicate to override."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import CollectorStatus, ReplicaStatus, RunState
from lightning_rl.errors import require_at_least


@dataclass(frozen=True, slots=True)
class SyncState:
    """What a schedule may look at: versions count iterations trained.

    ``engine_version`` is what all replicas generate with, ``collector`` how far it has got;
    ``trainer``, ``collector.state`` and ``replicas`` say who is running, waiting or stopped.
    """

    trainer_version: int
    engine_version: int
    collector: CollectorStatus = field(default_factory=CollectorStatus)
    trainer: RunState = RunState.RUNNING
    replicas: tuple[ReplicaStatus, ...] = ()

    @property
    def updates(self) -> int:
        """Iterations trained since the engine's weights."""
        return self.trainer_version - self.engine_version


class SyncSchedule(ABC):
    """Asked after every iteration."""

    @property
    def least_updates(self) -> int:
        """Iterations that it always lets pass between two pushes."""
        return 1

    @abstractmethod
    def should_sync(self, state: SyncState) -> bool:
        """True to push now. (Before the first iteration a push always happens.)"""


@configurable
@dataclass(frozen=True)
class FixedSchedule(SyncSchedule):
    """Push every ``every_n_iterations`` iterations.

    Raises:
        ConfigError: if that is less than 1.
    """

    every_n_iterations: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, every_n_iterations=self.every_n_iterations)

    @property
    def least_updates(self) -> int:
        return self.every_n_iterations

    def should_sync(self, state: SyncState) -> bool:
        return state.updates >= self.every_n_iterations


@configurable
@dataclass(frozen=True)
class TrainerSchedule(SyncSchedule):
    """The trainer decides: after ``min_updates`` iterations, as soon as the collector is ready.

    It is when a batch is done, nothing is in flight, or it may not go on with old weights.

    Raises:
        ConfigError: if ``min_updates`` is less than 1.
    """

    min_updates: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, min_updates=self.min_updates)

    @property
    def least_updates(self) -> int:
        return self.min_updates

    def should_sync(self, state: SyncState) -> bool:
        return state.updates >= self.min_updates and state.collector.ready


@dataclass(frozen=True)
class CollectorSchedule(SyncSchedule):
    """The collector decides: when it has used up the staleness that its rollouts may have.

    So weights are pushed as seldom as the collector's ``max_staleness`` allows: every
    ``max_staleness + 1`` iterations. The engine has nothing to do once it has written all that may
    be trained on until then.
    """

    def should_sync(self, state: SyncState) -> bool:
        return state.updates >= 1 and state.collector.used_up
