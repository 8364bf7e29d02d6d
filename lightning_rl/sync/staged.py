"""Transports that stage weights: who is told what, in which order, and who is left."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.engines.adapters import divide
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.engines.replica import Replica, ReplicaLost
from lightning_rl.engines.replicated import OUR_TRANSFER, ReplicatedEngine
from lightning_rl.errors import ConfigError, SyncTimeoutError, WeightSyncError, require_at_least
from lightning_rl.run.dist import any_rank
from lightning_rl.run.loop import background_loop
from lightning_rl.sync.adapters import merged
from lightning_rl.sync.base import (
    Bucket,
    Kind,
    WeightReceiver,
    Weights,
    WeightStream,
    WeightTransport,
)

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Answers = dict[Replica, Future[Any]]


class StagedTransport(WeightTransport):
    """Stages weights bucket by bucket (:meth:`stage`), where an engine takes them (:meth:`fetch`).

    Engines in processes of their own import the class for it. A replica that dies or hangs in the
    middle is left out (and restarted by the engine, then filled with what is staged), the others
    are served; one that refuses ends the push.

    Args:
        timeout_s: for each step of a push, and each bucket.
        keep_copy: whether all buckets stay where they are until the next push.
        changed_only: send only layers that differ from what was sent last.
        adapters_only: send a LoRA's base once, and then its adapters alone.

    Raises:
        ConfigError: for what excludes each other.
    """

    stages_in_memory: ClassVar[bool] = False
    """Whether buckets that stay are in the host's memory."""

    def __init__(
        self,
        timeout_s: float = 300.0,
        keep_copy: bool = True,
        changed_only: bool = False,
        adapters_only: bool = False,
    ) -> None:
        require_at_least(0.1, timeout_s=timeout_s)
        if changed_only and adapters_only:
            raise ConfigError(
                "changed_only=true and adapters_only=true exclude each other: all adapters change"
            )
        if changed_only and not keep_copy:
            raise ConfigError(
                "changed_only=true compares with what was sent last; set keep_copy: true, too"
            )
        if adapters_only and not keep_copy:
            raise ConfigError(
                "adapters_only=true sends the base again from a copy; set keep_copy: true, too"
            )
        self.timeout_s = timeout_s
        self.keep_copy = keep_copy
        self.changed_only = changed_only
        self.adapters_only = adapters_only
        self._engine: Engine | None = None
        self._joined: dict[Replica, int] = {}  # the life in which each was connected
        self._staged: dict[str, list[Bucket]] = {}  # by kind, adapters before their base
        self._kept: int | None = None  # the version of all that is staged, if it is complete
        self._has_base = False
        self._base_here: dict[str, Tensor] = {}  # by reference, for an engine in this process
        # A restarted replica is filled from another thread than the trainer's.
        self._exclusive = threading.RLock()

    @abstractmethod
    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        """Put bucket after bucket where the receiver finds it, and say where that is.

        Of a bucket with ``names`` only these weights differ from what was staged last. When a
        bucket is asked for, engines may still be loading the one before it.
        """

    @staticmethod
    def fetch(bucket: Bucket) -> Weights:
        """The other end, in the engine: a bucket's weights, under their Hugging Face names.

        Raises:
            DamagedWeightsError: if they are not what was staged.
        """
        raise NotImplementedError

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        """What fetches, made once in each worker; for a way that has to be kept open.

        Args:
            device: of the worker's model.
            rank: of the worker among those of its engine.
            options: what the sender says of the way.
        """
        return WeightReceiver(cls.fetch)

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if isinstance(engine, ReplicatedEngine):
            if engine.transfer_backend != OUR_TRANSFER:
                raise ConfigError(
                    f"{type(self).__name__} does not go by the engine's weight_transfer_config, "
                    f"backend: {engine.transfer_backend}; leave that out, or use NCCLTransport or "
                    "IPCTransport"
                )
            place, _, name = self._other_end().partition(".")
            if place == "__main__" or "<locals>" in name:
                raise ConfigError(
                    f"{type(self).__name__} takes weights in the engine's processes, which cannot "
                    "import it from a function or the script that runs; move it to a module of its "
                    "own"
                )
            engine.refill = self.refill
        self._engine = engine

    def weights_of(self, policy: "Policy") -> Weights:
        engine = self._engine
        as_they_are = engine is not None and engine.takes_adapters
        if not (self.adapters_only or as_they_are):
            yield from super().weights_of(policy)
            return
        yield from policy.named_adapter_weights()
        # Sharded weights are gathered by all ranks, also those whose transport pushes nothing.
        if any_rank(engine is not None and drives_engine(engine) and self._owes_base(engine)):
            yield from policy.named_base_weights()

    def _owes_base(self, engine: Engine) -> bool:
        """Whether adapters need their base beside them."""
        return engine.lacks_base if engine.takes_adapters else not self._has_base

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        keeps = self.stages_in_memory and self.keep_copy and isinstance(engine, ReplicatedEngine)
        return engine.weight_bytes(elements) if keeps else 0

    def push(self, weights: Weights, version: int) -> None:
        engine = self._engine
        if engine is None:
            raise WeightSyncError(f"{type(self).__name__}.push before connect(engine)")
        with self._exclusive:
            if not isinstance(engine, ReplicatedEngine):
                engine.load_weights(self._for_here(engine, weights, version), version)
                return
            with engine.taking_weights(version) as replicas:
                complete = not (self.changed_only or self.adapters_only) or any(
                    replica.version != self._kept for replica in replicas
                )
                self._kept = None
                buckets = self._stage_all(engine, weights, version, complete)
                left = self._deliver(engine, replicas, buckets, version, complete)
                self._kept = version if self.keep_copy else None
                if not left and not self.keep_copy:
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
                staged = chain.from_iterable(self._staged.values())
                self._deliver(engine, [replica], staged, version, True)

    def close(self) -> None:
        with self._exclusive:
            if isinstance(self._engine, ReplicatedEngine):
                self._engine.refill = None
            self._engine, self._kept, self._has_base = None, None, False
            self._base_here.clear()
            self._joined.clear()
            self._staged.clear()

    # ---------------------------------------------------------------- what is pushed

    def _stage_all(
        self, engine: ReplicatedEngine, weights: Weights, version: int, complete: bool
    ) -> Iterator[Bucket]:
        """Adapters first, for workers merge them into the base as that arrives."""
        adapters, others = divide(weights)
        if adapters:
            shapes = _shapes(adapters)
            yield from self._stage_kind(
                WeightStream(adapters.items(), shapes, torch.float32, version, "adapters")
            )
        if others is not None:
            dtype: torch.dtype = getattr(torch, engine.dtype)
            kind: Kind = "base" if self.adapters_only else "weights"
            changed_only = self.changed_only and not complete
            yield from self._stage_kind(
                WeightStream(others, engine.shapes, dtype, version, kind, changed_only)
            )
            self._has_base = self.adapters_only
        elif complete:
            yield from self._staged["base"]

    def _stage_kind(self, weights: WeightStream) -> Iterator[Bucket]:
        """Note what is staged; pass on what differs."""
        staged = self._staged[weights.kind] = []
        for bucket in self.stage(weights):
            staged.append(bucket | {"names": None})
            if bucket.get("names") != []:
                yield bucket

    def _for_here(self, engine: Engine, weights: Weights, version: int) -> Weights:
        """To an engine in this process: what arrives there."""
        dtype: torch.dtype = getattr(torch, engine.dtype)
        if engine.takes_adapters:
            return self._arriving_apart(weights, dtype, version)
        if not self.adapters_only:
            return self._arriving(weights, dtype, version, "weights")
        adapters, base = divide(weights)
        self._base_here.update(base or ())
        self._has_base = True
        arriving = self._arriving(adapters.items(), torch.float32, version, "adapters")
        return merged(self._base_here, arriving)

    def _arriving_apart(self, weights: Weights, dtype: torch.dtype, version: int) -> Weights:
        """Adapters, and their base if it is there, as they are."""
        adapters, base = divide(weights)
        yield from self._arriving(adapters.items(), torch.float32, version, "adapters")
        if base is not None:
            yield from self._arriving(base, dtype, version, "base")

    def _arriving(self, weights: Weights, dtype: torch.dtype, version: int, kind: Kind) -> Weights:
        """The whole way, with both ends in this process."""
        held = dict(weights)
        buckets = self.stage(WeightStream(held.items(), _shapes(held), dtype, version, kind))
        if self.keep_copy:  # then what cannot be staged leaves the engine as it is
            buckets = iter(list(buckets))
        return _fetched(self.receiver(torch.device("cpu"), 0), buckets)

    # ---------------------------------------------------------------- who is told what

    def _join(self, replica: Replica) -> None:
        """Connect to a replica that was started since."""
        self._invite(replica).result()

    def _invite(self, replica: Replica, **options: Any) -> Future[Any]:
        """Let its workers make their receivers, with these options."""
        info = {"transport": self._other_end(), "options": options}
        step = "init_weight_transfer_engine"
        return submit(replica.transfer(step, self.timeout_s, init_info=info))

    def _other_end(self) -> str:
        """Import path of the class that says how to fetch: this one, or one that it is made of."""
        names = ("fetch", "receiver")
        cls = next(c for c in type(self).__mro__ if any(name in vars(c) for name in names))
        return f"{cls.__module__}.{cls.__qualname__}"

    def _transmit(self, bucket: Bucket, replica: Replica) -> None:
        """Send what a replica waits for after it was told of a bucket."""

    def _leave(self, replica: Replica) -> None:
        """Let go of what connects to a replica that is lost, or that has failed."""

    def _deliver(
        self,
        engine: ReplicatedEngine,
        replicas: list[Replica],
        buckets: Iterable[Bucket],
        version: int,
        complete: bool,
    ) -> list[Replica]:
        """Tell all of each bucket; returns the replicas that have taken everything."""
        live = list(replicas)

        def ask(question: Callable[[Replica], Coroutine[Any, Any, Any]]) -> Answers:
            return {replica: submit(question(replica)) for replica in live}

        def tell(bucket: Bucket | None) -> Answers:  # None: that was the last
            info = {"bucket": bucket, "complete": complete}
            return ask(lambda r: r.transfer("update_weights", self.timeout_s, update_info=info))

        def settle(answers: Answers) -> None:
            for replica, answer in answers.items():
                with self._surviving(replica, engine, live):
                    answer.result()

        try:
            for replica in replicas:
                if self._joined.get(replica) != replica.life:
                    with self._surviving(replica, engine, live):
                        self._join(replica)
                        self._joined[replica] = replica.life
            loading = ask(lambda r: r.begin(self.timeout_s))
            for bucket in buckets:
                # One call at a time: two may overtake each other on their way.
                settle(loading)
                loading = tell(bucket)
                for replica in list(live):
                    with self._surviving(replica, engine, live):
                        self._transmit(bucket, replica)
            settle(loading)
            settle(tell(None))
            settle(ask(lambda r: r.set_version(version, self.timeout_s)))
        except BaseException:
            for replica in self._joined:  # who knows in which state the connections are
                self._leave(replica)
            self._joined.clear()
            raise
        for replica in live:
            replica.version = version
        return live

    @contextmanager
    def _surviving(
        self, replica: Replica, engine: ReplicatedEngine, live: list[Replica]
    ) -> Iterator[None]:
        """Leave out of ``live`` a replica that dies or hangs; other errors pass."""
        try:
            yield
        except (ReplicaLost, SyncTimeoutError) as error:
            # Stuck, or cut off, is as good as dead: the engine waits for it, or starts it anew.
            if replica in live:
                live.remove(replica)
            self._leave(replica)  # on a GPU, a broadcast that waits for it keeps the device busy
            background_loop().call_soon_threadsafe(engine.lost, replica, error)


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run it in the background loop; every coroutine here has a timeout of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def _fetched(receiver: WeightReceiver, buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    try:
        for bucket in buckets:
            yield from receiver.fetch(bucket)
    finally:
        receiver.close()


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}
