"""When to sync: one predicate to override."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import ReplicaStatus, RunState
from lightning_rl.errors import ConfigError, require_at_least


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """What a schedule may know of a collector, between two batches.

    ``in_flight`` and ``done`` are groups, ``wanted`` how many a batch takes; ``may_issue`` tells
    whether more may be generated with the engine's present weights; ``used_up``, that the next
    batch may train on nothing that these write, and waits for new ones; ``closed``, that it has not
    begun, or has ended.
    """

    in_flight: int = 0
    done: int = 0
    wanted: int = 0
    may_issue: bool = False
    used_up: bool = True
    closed: bool = False

    @property
    def state(self) -> RunState:
        """Running while groups are, or may be, generated; waiting if that takes new weights."""
        if self.closed:
            return RunState.STOPPED
        return RunState.RUNNING if self.in_flight or self.may_issue else RunState.WAITING

    @property
    def ready(self) -> bool:
        """New weights would come at a good moment: a batch is done, or nothing is being done."""
        return self.done >= self.wanted or self.in_flight == 0 or not self.may_issue


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
    measure_kl: Callable[[], float] | None = None

    @property
    def updates(self) -> int:
        """Iterations trained since the engine's weights."""
        return self.trainer_version - self.engine_version

    def kl(self) -> float:
        """Mean KL per token, in nats, from the engine's weights to the policy's.

        It is measured when asked for, by one forward pass, on what the engine wrote with its
        present weights for the batch that was trained on last; nan if it wrote none of it. With
        several processes it is the same on all, and all have to ask.

        Raises:
            ConfigError: if there is no such batch, as where no ``WeightSync`` asks.
        """
        if self.measure_kl is None:
            raise ConfigError(
                "SyncState.kl() is known to a schedule, when WeightSync asks it after an iteration"
            )
        return self.measure_kl()


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
