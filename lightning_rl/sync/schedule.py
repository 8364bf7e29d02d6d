"""When to sync: one predicate to override."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import ReplicaStatus, RunState
from lightning_rl.errors import ConfigError, require_at_least


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """The state of a collector between two batches, for schedules.

    ``in_flight`` and ``done`` count groups, and ``wanted`` is the size of a batch; ``may_issue``
    tells whether the engine's present weights may generate more groups; ``used_up``, that the next
    batch may not train on rollouts of these weights, so the collector waits for new ones;
    ``closed``, that it has not begun, or has ended.
    """

    in_flight: int = 0
    done: int = 0
    wanted: int = 0
    may_issue: bool = False
    used_up: bool = True
    closed: bool = False

    @property
    def state(self) -> RunState:
        """Running while groups are or may be generated; waiting if that needs new weights."""
        if self.closed:
            return RunState.STOPPED
        return RunState.RUNNING if self.in_flight or self.may_issue else RunState.WAITING

    @property
    def ready(self) -> bool:
        """True if it is a good moment for new weights: a batch is done, or nothing is running."""
        return self.done >= self.wanted or self.in_flight == 0 or not self.may_issue


@dataclass(frozen=True, slots=True)
class SyncState:
    """The state of a run, for schedules; versions count trained iterations.

    ``engine_version`` is the version that all replicas generate with, and ``collector`` the
    collector's progress; ``trainer``, ``collector.state`` and ``replicas`` tell which of them are
    running, waiting or stopped.
    """

    trainer_version: int
    engine_version: int
    collector: CollectorStatus = field(default_factory=CollectorStatus)
    trainer: RunState = RunState.RUNNING
    replicas: tuple[ReplicaStatus, ...] = ()
    measure_kl: Callable[[], float] | None = None

    @property
    def updates(self) -> int:
        """Number of iterations trained since the engine's weights."""
        return self.trainer_version - self.engine_version

    def kl(self) -> float:
        """Measure the mean KL per token, in nats, from the engine's weights to the policy's.

        It takes one forward pass over the tokens of the last trained batch that the engine
        generated with its present weights. Where a collector prefetches, the batches after a push
        have none: then it is over the first of them, which takes another pass, before it is
        trained; each token is weighted by how much likelier the engine's weights make it than those
        that wrote it. nan only if this is the first time that a schedule asks. With several
        processes, all must call it, and get the same value.

        Raises:
            ConfigError: if there is no such batch, i.e. outside a call by ``WeightSync``.
        """
        if self.measure_kl is None:
            raise ConfigError(
                "SyncState.kl() works only in a schedule that WeightSync asks after an iteration"
            )
        return self.measure_kl()


class SyncSchedule(ABC):
    """Decides whether to push weights: after every iteration, and while the trainer waits.

    It is asked in a wait only as long as the engine's weights are not the newest, and only on a
    single process.
    """

    @property
    def least_updates(self) -> int:
        """Minimum number of iterations between two pushes."""
        return 1

    @abstractmethod
    def should_sync(self, state: SyncState) -> bool:
        """Return True to push now. (A push always happens before the first iteration.)"""


@configurable
@dataclass(frozen=True)
class FixedSchedule(SyncSchedule):
    """Push every ``every_n_iterations`` iterations.

    Args:
        every_n_iterations: iterations between two pushes.

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

    The collector is ready when a batch is done, nothing is in flight, or it needs new weights.

    Args:
        min_updates: least number of iterations between two pushes.

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
    """The collector decides: when its rollouts would exceed the allowed staleness.

    So weights are pushed as rarely as the collector's ``max_staleness`` allows: every
    ``max_staleness + 1`` iterations. The engine is idle once it has generated all rollouts that may
    be trained on until then.
    """

    def should_sync(self, state: SyncState) -> bool:
        return state.updates >= 1 and state.collector.used_up
