"""Weight pushes to an engine's replicas, which continue if a replica dies."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from lightning_rl.engines.base import drives_engine
from lightning_rl.engines.push import Push, PushRecord
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError
from lightning_rl.run.loop.background import runtime
from lightning_rl.sync.adapters import weights_apart
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.frozen import FrozenWeights
from lightning_rl.sync.stream import Bucket, Weights, WeightStream, streams_of

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Answers = dict[Replica, Future[Any]]
Question = Callable[[Replica], Coroutine[Any, Any, Any]]


class Stager(Protocol):
    """The part of a transport that a push to replicas uses: see ``StagedTransport``."""

    timeout_s: float
    keep_copy: bool
    leaves_out: ClassVar[bool]
    changed_only: bool
    adapters_only: bool

    def stage(self, weights: WeightStream) -> Iterator[Bucket]: ...
    def join(self, replica: Replica) -> None: ...
    def transmit(self, bucket: Bucket, replica: Replica) -> None: ...
    def leave(self, replica: Replica) -> None: ...


class ReplicaPush(WeightTransport):
    """Stages weights once, and lets all replicas fetch them, bucket by bucket.

    A replica that dies or hangs during the push is left out (the engine restarts it, and it is then
    filled with the staged weights), and the others continue; one that refuses fails the push.

    Args:
        transport: stages the weights, and connects to replicas.
        engine: the engine whose replicas get the weights.
    """

    def __init__(self, transport: Stager, engine: ReplicatedEngine) -> None:
        self.transport, self.engine = transport, engine
        self._joined: dict[Replica, int] = {}  # the life in which each was connected
        self._staged: dict[str, list[Bucket]] = {}  # by kind, adapters before their base
        self._kept: int | None = None  # the version of all that is staged, if it is complete
        self._has_base = False
        self._frozen = FrozenWeights()
        self._sent: PushRecord | None = None
        # A restarted replica is filled from another thread than the trainer's.
        self._exclusive = threading.RLock()
        engine.refill = self.refill

    def weights_of(self, policy: "Policy") -> Weights:
        if not self._adapters_alone:
            # Frozen weights are in the copy, from which also a restarted replica has them.
            keeps = self.transport.leaves_out and self._kept is not None
            return self._frozen.weights_of(policy, drives_engine(self.engine) and not keeps)
        # Without a copy of the base it goes along each time: a replica may have been restarted.
        owes_base = not (self._has_base and self.transport.keep_copy)
        return weights_apart(policy, drives_engine(self.engine) and owes_base)

    @property
    def _adapters_alone(self) -> bool:
        """True if pushes bring a LoRA's adapters alone, and their base only once."""
        return self.transport.adapters_only or self.engine.takes_adapters

    def push(self, weights: Weights, version: int) -> None:
        transport, coming = self.transport, Push.of(weights)
        with self._exclusive, self.engine.taking_weights(version) as replicas:
            some = transport.changed_only or self._adapters_alone or coming.kept
            complete = not some or not self._all_hold_what_is_kept(replicas)
            self._kept, self._sent = None, coming.ledger
            buckets = self._stage_all(coming, version, complete)
            left = self._deliver(replicas, buckets, version, complete)
            for replica in left:
                replica.version = version
            self._kept = version if transport.keep_copy else None
            if not left and not transport.keep_copy:
                raise ReplicaLost(
                    f"all replicas were lost during the push of version {version}, and "
                    f"{type(transport).__name__} keeps no copy to fill a restarted one with; set "
                    "keep_copy: true"
                )

    def _all_hold_what_is_kept(self, replicas: list[Replica]) -> bool:
        return all(replica.version == self._kept for replica in replicas)

    def refill(self, replica: Replica) -> None:
        """Give a restarted replica the weights of the last push, if they are kept."""
        with self._exclusive:
            version = self._kept
            if version is not None and replica.version != version:
                for filled in self._deliver([replica], self._all_staged(), version, True):
                    if self._sent is not None:
                        self._sent.require_held(
                            lambda names: self.engine.holdings_of([replica], names)
                        )
                    filled.version = version

    def close(self) -> None:
        with self._exclusive:
            self.engine.refill = None
            self._kept = None
            self._joined.clear()
            self._staged.clear()

    # ---------------------------------------------------------------- what is pushed

    def _stage_all(self, weights: Push, version: int, complete: bool) -> Iterator[Bucket]:
        dtype: torch.dtype = getattr(torch, self.engine.dtype)
        changed_only = self.transport.changed_only and not complete
        kinds = []
        for stream in streams_of(weights, self.engine.shapes, dtype, version, changed_only):
            kinds.append(stream.kind)
            if weights.kept:
                stream.staged = self._staged[stream.kind]
                yield from self._stage_again(stream, complete)
            else:
                yield from self._stage_anew(stream, complete)
        if "base" in kinds:
            self._has_base = True
        elif complete and "adapters" in kinds:
            yield from self._staged["base"]

    def _stage_anew(self, weights: WeightStream, complete: bool) -> Iterator[Bucket]:
        """Record the staged buckets; yield those with changes, or all if ``complete``."""
        staged = self._staged[weights.kind] = []
        for bucket in self.transport.stage(weights):
            whole = bucket | {"names": None}
            staged.append(whole)
            if complete or bucket.get("names") != []:
                yield whole if complete else bucket

    def _stage_again(self, weights: WeightStream, complete: bool) -> Iterator[Bucket]:
        """Stage what comes beside what is kept; yield the changes, or everything."""
        for bucket in self.transport.stage(weights):
            if not complete and bucket.get("names") != []:
                yield bucket
        if complete:
            yield from weights.staged

    def _all_staged(self) -> Iterable[Bucket]:
        """Return all buckets, whole, for a replica that holds nothing."""
        return chain.from_iterable(self._staged.values())

    # ---------------------------------------------------------------- who is told what

    def _deliver(
        self, replicas: list[Replica], buckets: Iterable[Bucket], version: int, complete: bool
    ) -> list[Replica]:
        """Announce each bucket to all; return the replicas that have loaded everything."""
        live, timeout_s = list(replicas), self.transport.timeout_s

        def ask(question: Question) -> Answers:
            return {replica: submit(question(replica)) for replica in live}

        def tell(bucket: Bucket | None) -> Answers:  # None: that was the last
            return ask(self._telling(bucket, complete))

        def settle(answers: Answers) -> None:
            for replica, answer in answers.items():
                with self._surviving(replica, live):
                    answer.result()

        try:
            self._forget_departed()
            for replica in replicas:
                if self._joined.get(replica) != replica.life:
                    with self._surviving(replica, live):
                        self.transport.join(replica)
                        self._joined[replica] = replica.life
            loading = ask(lambda r: r.begin(timeout_s))
            for bucket in buckets:
                # One call at a time: two may overtake each other on their way.
                settle(loading)
                loading = tell(bucket)
                for replica in list(live):
                    with self._surviving(replica, live):
                        self.transport.transmit(bucket, replica)
            settle(loading)
            settle(tell(None))
            settle(ask(lambda r: r.set_version(version, timeout_s)))
        except BaseException:
            self._leave_all()  # who knows in which state the connections are
            raise
        return live

    def _telling(self, bucket: Bucket | None, complete: bool) -> Question:
        """Return the call that announces a bucket to a replica; None: there are no more."""
        info = {"bucket": bucket, "complete": complete}
        timeout_s = self.transport.timeout_s
        return lambda r: r.transfer("update_weights", timeout_s, update_info=info)

    def _leave_all(self) -> None:
        for replica in self._joined:
            self.transport.leave(replica)
        self._joined.clear()

    def _lost(self, replica: Replica, error: Exception) -> None:
        """Report a lost replica to the engine, which waits for it or restarts it."""
        runtime.loop.call_soon_threadsafe(self.engine.lost, replica, error)

    def _forget_departed(self) -> None:
        """Disconnect from replicas that left the engine since the last push."""
        for departed in self._joined.keys() - set(self.engine.replicas):
            self.transport.leave(departed)
            del self._joined[departed]

    @contextmanager
    def _surviving(self, replica: Replica, live: list[Replica]) -> Iterator[None]:
        """Remove a replica that dies or hangs from ``live``; let other errors pass."""
        try:
            yield
        except (ReplicaLost, SyncTimeoutError) as error:
            # Stuck, or cut off, is as good as dead: the engine waits for it, or starts it anew.
            if replica in live:
                live.remove(replica)
            # On a GPU, a broadcast that waits for it keeps the device busy.
            self.transport.leave(replica)
            self._lost(replica, error)


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine in the background loop; every coroutine here has its own timeout."""
    return asyncio.run_coroutine_threadsafe(coroutine, runtime.loop)
