"""What transports to other processes share: who is told what, in which order, and who is left."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor

from lightning_rl.engines.base import Engine, feeds_engine
from lightning_rl.engines.replica import Replica, ReplicaLost
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.engines.vllm_server import OUR_TRANSFER
from lightning_rl.errors import ConfigError, SyncTimeoutError, WeightSyncError, require_at_least
from lightning_rl.models.policy import Policy
from lightning_rl.run.dist import any_rank
from lightning_rl.run.loop import background_loop
from lightning_rl.sync.adapters import divide, merged
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.sources import Bucket

Calls = dict[Replica, Future[Any]]


class RemoteTransport(WeightTransport):
    """Pushes to all replicas of an engine, bucket by bucket, and fills those that were restarted.

    A replica that dies or hangs in the middle is left out (and restarted by the engine), the others
    are served; one that refuses ends the push.

    Args:
        timeout_s: for each step of a push, and each bucket.
        changed_only: send only layers that differ from what was sent last.
        adapters_only: send a LoRA's base once, and then its adapters alone.

    Raises:
        ConfigError: for both at the same time.
    """

    source: ClassVar[str]
    """The receiving end, in :mod:`lightning_rl.sync.sources`."""

    def __init__(self, timeout_s: float, changed_only: bool, adapters_only: bool) -> None:
        require_at_least(0.1, timeout_s=timeout_s)
        if changed_only and adapters_only:
            raise ConfigError(
                "changed_only=true and adapters_only=true exclude each other: all adapters change"
            )
        self.timeout_s = timeout_s
        self.changed_only = changed_only
        self.adapters_only = adapters_only
        self._engine: Engine | None = None
        self._joined: dict[Replica, int] = {}  # the life in which each was connected
        self._kept: int | None = None  # the version that can be pushed again
        self._has_base = False
        self._base_here: dict[str, Tensor] = {}  # by reference, for an engine in this process
        # A restarted replica is filled from another thread than the trainer's.
        self._exclusive = threading.RLock()

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if (backend := getattr(engine, "transfer_backend", OUR_TRANSFER)) != OUR_TRANSFER:
            raise ConfigError(
                f"{type(self).__name__} does not go by the engine's weight_transfer_config, "
                f"backend: {backend}; leave that out, or use NCCLTransport or IPCTransport"
            )
        self._engine = engine
        if isinstance(engine, ReplicatedEngine):
            engine.refill = self.refill

    def weights_of(self, policy: Policy) -> Iterable[tuple[str, Tensor]]:
        if not self.adapters_only:
            return super().weights_of(policy)
        return chain(policy.named_adapter_weights(), self._base_of(policy))

    def _base_of(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """Nothing, if a push before has brought it."""
        # Sharded weights are gathered by all ranks, also those whose transport pushes nothing.
        if any_rank(self._engine is not None and feeds_engine(self._engine) and not self._has_base):
            yield from policy.named_base_weights()

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        engine = self._engine
        if engine is None:
            raise WeightSyncError(f"{type(self).__name__}.push before connect(engine)")
        with self._exclusive:
            if not isinstance(engine, ReplicatedEngine):
                engine.load_weights(self._for_here(engine, weights, version), version)
                return
            with engine.taking_weights(version) as replicas:
                everything = not (self.changed_only or self.adapters_only) or any(
                    replica.version != self._kept for replica in replicas
                )
                self._kept = None
                updates = self._stage(engine, weights, version, everything)
                left = self._deliver(engine, replicas, updates, version, everything)
                self._kept = version if self._keeps else None
                if not left and not self._keeps:
                    raise ReplicaLost(
                        f"no replica was left at the end of the push of version {version}, and "
                        f"{type(self).__name__} keeps no copy to fill a restarted one with"
                    )

    def refill(self, replica: Replica) -> None:
        """Give a replica that was restarted the weights of the last push, if they are kept."""
        engine = self._engine
        if not isinstance(engine, ReplicatedEngine):
            return
        with self._exclusive:
            version = self._kept
            if version is not None and replica.version != version:
                self._deliver(engine, [replica], self._again(version), version, True)

    def close(self) -> None:
        with self._exclusive:
            if isinstance(self._engine, ReplicatedEngine):
                self._engine.refill = None
            self._engine, self._kept, self._has_base = None, None, False
            self._base_here.clear()
            self._joined.clear()

    # ---------------------------------------------------------------- to be filled in

    @property
    @abstractmethod
    def _keeps(self) -> bool:
        """Whether a push leaves behind what the next replica can be filled with."""

    @abstractmethod
    def _stage(
        self,
        engine: ReplicatedEngine,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        everything: bool,
    ) -> Iterator[Bucket]:
        """Put bucket after bucket where the workers find it, and say where that is.

        When a bucket is asked for, the engines may still be loading the one before it.
        """

    @abstractmethod
    def _again(self, version: int) -> Iterator[Bucket]:
        """The buckets of the last push."""

    def _carry_here(
        self, engine: Engine, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> Iterable[tuple[str, Tensor]]:
        """To an engine in this process: what arrives there."""
        return weights

    def _join(self, replica: Replica) -> None:
        """Connect to a replica that was started since."""
        info = {"source": self.source, "options": {}}
        self._ask(replica, "init_weight_transfer_engine", init_info=info).result()

    def _transmit(self, bucket: Bucket, replica: Replica) -> None:
        """Send what a replica waits for after it was told of a bucket."""

    def _leave(self, replica: Replica) -> None:
        """Let go of what connects to a replica that is lost, or that has failed."""

    # ---------------------------------------------------------------- the push

    def _for_here(
        self, engine: Engine, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> Iterable[tuple[str, Tensor]]:
        if not self.adapters_only:
            return self._carry_here(engine, weights, version)
        adapters, base = divide(weights)
        self._base_here.update(base or ())
        self._has_base = True
        return merged(self._base_here, self._carry_here(engine, adapters.items(), version))

    def _deliver(
        self,
        engine: ReplicatedEngine,
        replicas: list[Replica],
        buckets: Iterator[Bucket],
        version: int,
        everything: bool,
    ) -> list[Replica]:
        """Returns the replicas that have taken everything."""
        live = _Live(engine, replicas, self._leave)
        try:
            self._join_new(live)
            loading = {r: submit(r.begin(self.timeout_s)) for r in live.replicas}
            for bucket in buckets:
                # One call at a time: two may overtake each other on their way.
                live.settle(loading)
                loading = self._update(live, bucket, everything)
                for replica in list(live.replicas):
                    with live.surviving(replica):
                        self._transmit(bucket, replica)
            live.settle(loading)
            live.settle(self._update(live, None, everything))
            live.settle({r: submit(r.set_version(version, self.timeout_s)) for r in live.replicas})
        except BaseException:
            for replica in self._joined:  # who knows in which state the connections are
                self._leave(replica)
            self._joined.clear()
            raise
        for replica in live.replicas:
            replica.version = version
        return live.replicas

    def _update(self, live: "_Live", bucket: Bucket | None, everything: bool) -> Calls:
        """Tell of a bucket, or (None) that this was the last."""
        info = {"bucket": bucket, "complete": everything}
        return {r: self._ask(r, "update_weights", update_info=info) for r in live.replicas}

    def _join_new(self, live: "_Live") -> None:
        for replica in list(live.replicas):
            if self._joined.get(replica) != replica.life:
                with live.surviving(replica):
                    self._join(replica)
                    self._joined[replica] = replica.life

    def _ask(self, replica: Replica, step: str, **arguments: Any) -> Future[Any]:
        return submit(replica.transfer(step, self.timeout_s, **arguments))


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run it in the background loop; every coroutine here has a timeout of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


class _Live:
    """The replicas that have answered every call so far."""

    def __init__(
        self,
        engine: ReplicatedEngine,
        replicas: list[Replica],
        leave: Callable[[Replica], None],
    ) -> None:
        self._engine = engine
        self._leave = leave
        self.replicas = list(replicas)

    def settle(self, calls: Calls) -> None:
        """Wait for the answers; leave out who gives none."""
        for replica, call in calls.items():
            with self.surviving(replica):
                call.result()

    @contextmanager
    def surviving(self, replica: Replica) -> Iterator[None]:
        """Takes the death of a replica for what it is; other errors pass."""
        try:
            yield
        except ReplicaLost as error:
            self._lose(replica, error)
        except SyncTimeoutError as error:
            if not replica.can_restart:
                raise
            self._lose(replica, error)  # stuck is as good as dead: another takes its place

    def _lose(self, replica: Replica, error: Exception) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)
        self._leave(replica)  # on a GPU, a broadcast that waits for it keeps the device busy
        background_loop().call_soon_threadsafe(self._engine.lost, replica, error)
