"""Weight pushes to an engine's replicas, which continue if a replica dies."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from lightning_rl.engines.base import drives_engine
from lightning_rl.engines.lora import divide, require_adapters
from lightning_rl.engines.push import Push, PushRecord
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError
from lightning_rl.run.loop.background import runtime
from lightning_rl.sync.adapters import weights_apart
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.frozen import FrozenWeights
from lightning_rl.sync.stream import Bucket, Kind, WeightPart, Weights, parts_of

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Answers = dict[Replica, Future[Any]]
Question = Callable[[Replica], Coroutine[Any, Any, Any]]


class Stager(Protocol):
    """The part of a transport that a push to replicas uses: see ``StagedTransport``."""

    timeout_s: float
    keep_copy: bool
    leaves_out: ClassVar[bool]
    adapters_only: bool
    bucket_mb: float

    def stage(self, part: WeightPart) -> Bucket: ...
    def end_push(self, version: int) -> None: ...
    def join(self, replica: Replica) -> None: ...
    def transmit(self, bucket: Bucket, replica: Replica) -> None: ...
    def leave(self, replica: Replica) -> None: ...


class ReplicaPush(WeightTransport):
    """Stages weights once, and lets all replicas fetch them, bucket by bucket.

    Args:
        transport: stages the weights, and connects to replicas.
        engine: the engine whose replicas get the weights.
    """

    def __init__(self, transport: Stager, engine: ReplicatedEngine) -> None:
        self.transport, self.engine = transport, engine
        self.joined: dict[Replica, int] = {}
        """The life in which each replica was connected."""
        self._staged: dict[Kind, list[tuple[Bucket, list[str]]]] = {}  # adapters before their base
        self._kept: int | None = None  # the version of all that is staged, if it is complete
        self._has_base = False
        self._frozen = FrozenWeights()
        self._sent: PushRecord | None = None
        # A restarted replica is filled from another thread than the trainer's.
        self._exclusive = threading.RLock()
        engine.refill = self.refill

    def weights_of(self, policy: "Policy") -> Weights:
        drives = drives_engine(self.engine)
        if self._adapters_alone:
            # Without a copy of the base it goes along each time: a replica may have been restarted.
            return weights_apart(
                policy, drives and not (self._has_base and self.transport.keep_copy)
            )
        # Frozen weights are in the copy, from which also a restarted replica has them.
        keeps = self.transport.leaves_out and self._kept is not None
        return self._frozen.weights_of(policy, drives and not keeps)

    @property
    def _adapters_alone(self) -> bool:
        """True if pushes bring a LoRA's adapters alone, and their base only once."""
        return self.transport.adapters_only or self.engine.takes_adapters

    def push(self, weights: Weights, version: int) -> None:
        coming = Push.of(weights)
        with self._exclusive, self.engine.taking_weights(version) as replicas:
            is_part = self._adapters_alone or bool(coming.kept)
            complete = not (is_part and self._hold_what_is_kept(replicas))
            self._kept, self._sent = None, coming.ledger
            try:
                left = self._deliver(coming, version, self.delivery(replicas, complete))
            except BaseException:
                self.leave_all()  # who knows in which state the connections are
                raise
            for replica in left:
                replica.version = version
            self._kept = version if self.transport.keep_copy else None
            if not left and not self.transport.keep_copy:
                raise ReplicaLost(
                    f"no replica has got version {version}, because replicas were lost during its "
                    f"push, and {type(self.transport).__name__} keeps no copy to send again; set "
                    "keep_copy: true"
                )

    def _deliver(self, coming: Push, version: int, delivery: "Delivery") -> list[Replica]:
        """Stage and send part after part; return the replicas that have loaded everything."""
        sent = set()
        delivery.begin()
        for part in self._parts(coming, version):
            bucket = self.transport.stage(part)
            whole = bucket | {"names": None}
            if part.before is None:
                self._staged.setdefault(part.kind, [])[part.number :] = [(whole, [*part.weights])]
            sent.add((part.kind, part.number))
            delivery.send(whole if delivery.complete else bucket)
        self._has_base |= any(kind == "base" for kind, _ in sent)
        self.transport.end_push(version)
        if delivery.complete:  # and what did not come, because it is kept
            for kind, staged in self._staged.items():
                for number, (bucket, _) in enumerate(staged):
                    if (kind, number) not in sent:
                        delivery.send(bucket)
        return delivery.finish(version)

    def _parts(self, coming: Push, version: int) -> Iterator[WeightPart]:
        """Check the weights of a push as they come, and divide them."""
        shapes, dtype = self.engine.shapes, getattr(torch, self.engine.dtype)
        adapters, others = divide(coming)
        if adapters:
            require_adapters(adapters, shapes)
        rest = () if others is None else Push(others, coming.kept).checked(shapes)
        before = self._staged["weights"] if coming.kept else ()
        weights = chain(adapters.items(), rest)
        return parts_of(weights, dtype, version, self.transport.bucket_mb, before)

    def delivery(self, replicas: list[Replica], complete: bool) -> "Delivery":
        """Return what brings buckets to these replicas."""
        return Delivery(self, replicas, complete)

    def _hold_what_is_kept(self, replicas: list[Replica]) -> bool:
        return all(replica.version == self._kept for replica in replicas)

    def deliver_copy(self, replicas: list[Replica], version: int) -> list[Replica]:
        """Send all that is staged; return the replicas that have loaded it."""
        delivery = self.delivery(replicas, complete=True)
        delivery.begin()
        for staged in self._staged.values():
            for bucket, _ in staged:
                delivery.send(bucket)
        return delivery.finish(version)

    def refill(self, replica: Replica) -> None:
        """Give a restarted replica the weights of the last push, if they are kept."""
        with self._exclusive:
            version = self._kept
            if version is None or replica.version == version:
                return
            try:
                left = self.deliver_copy([replica], version)
            except BaseException:
                self.leave_all()
                raise
            for filled in left:
                if self._sent is not None:
                    self._sent.require_held(
                        lambda names: self.engine.held_digests_of([replica], names)
                    )
                filled.version = version

    def close(self) -> None:
        with self._exclusive:
            self.engine.refill = None
            self._kept = None
            self.joined.clear()
            self._staged.clear()

    # ---------------------------------------------------------------- connections

    def lost(self, replica: Replica, error: Exception) -> None:
        """Report a lost replica to the engine, which waits for it or restarts it."""
        runtime.loop.call_soon_threadsafe(self.engine.lost, replica, error)

    def forget_departed(self) -> None:
        """Disconnect from replicas that left the engine since the last push."""
        for departed in self.joined.keys() - set(self.engine.replicas):
            self.transport.leave(departed)
            del self.joined[departed]

    def leave_all(self) -> None:
        """Disconnect from all replicas."""
        for replica in self.joined:
            self.transport.leave(replica)
        self.joined.clear()


class Delivery:
    """Brings buckets to replicas, each by itself; one that dies or hangs is left out.

    Such a replica is restarted by the engine, and then filled with what is staged. One that refuses
    fails the push.

    Args:
        route: the push to these replicas.
        replicas: the replicas.
        complete: whether they get all weights, or only those that differ from what they hold.
    """

    def __init__(self, route: ReplicaPush, replicas: list[Replica], complete: bool) -> None:
        self.route, self.live, self.complete = route, list(replicas), complete
        self.transport, self.timeout_s = route.transport, route.transport.timeout_s
        self._answers: Answers = {}

    def begin(self) -> None:
        """Connect to replicas that were started since the last push, and begin this one."""
        joined = self.route.joined
        self.route.forget_departed()
        for replica in list(self.live):
            if joined.get(replica) != replica.life:
                with self._surviving(replica):
                    self.transport.join(replica)
                    joined[replica] = replica.life
        self._ask(lambda replica: replica.begin(self.timeout_s))

    def send(self, bucket: Bucket) -> None:
        """Announce a bucket, which replicas load while the next one is staged."""
        self._announce(bucket)
        for replica in list(self.live):
            with self._surviving(replica):
                self.transport.transmit(bucket, replica)

    def finish(self, version: int) -> list[Replica]:
        """End the push; return the replicas that have loaded everything."""
        self._announce(None)
        self._ask(lambda replica: replica.set_version(version, self.timeout_s))
        self._settle()
        return self.live

    def _announce(self, bucket: Bucket | None) -> None:
        info = {"bucket": bucket, "complete": self.complete}  # None: that was the last one
        self._ask(lambda r: r.transfer("update_weights", self.timeout_s, update_info=info))

    def _ask(self, question: Question) -> None:
        # One call at a time: two may overtake each other on their way.
        self._settle()
        self._answers = {replica: submit(question(replica)) for replica in self.live}

    def _settle(self) -> None:
        """Wait for the answers to what was asked last."""
        answers, self._answers = self._answers, {}
        for replica, answer in answers.items():
            with self._surviving(replica):
                answer.result()

    @contextmanager
    def _surviving(self, replica: Replica) -> Iterator[None]:
        """Leave out a replica that dies or hangs; let other errors pass."""
        try:
            yield
        except (ReplicaLost, SyncTimeoutError) as error:
            # Stuck, or cut off, is as good as dead: the engine waits for it, or starts it anew.
            if replica in self.live:
                self.live.remove(replica)
            self.transport.leave(replica)
            self.route.lost(replica, error)


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine in the background loop; every coroutine here has its own timeout."""
    return asyncio.run_coroutine_threadsafe(coroutine, runtime.loop)
