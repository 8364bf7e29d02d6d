"""One broadcast for all replicas: the trainer's traffic does not grow with their number."""

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replica import Replica, ReplicaLost
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError, first_line
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.collective import BroadcastGroup, CollectiveTransport
from lightning_rl.sync.replicas import Answers, Question, ReplicaPush, submit
from lightning_rl.sync.stream import Bucket

_log = logging.getLogger(__name__)


@configurable
class SharedCollectiveTransport(CollectiveTransport):
    """Like :class:`CollectiveTransport`, with one group of the trainer and all replicas.

    The trainer sends a bucket once (NCCL) or log2(replicas) times (gloo), and the replicas forward
    it. If a replica dies or hangs during a push, the push is repeated with a group for each
    remaining replica; the next push uses a single group again. So a lost replica costs more time
    than with ``CollectiveTransport``, and a new group is made whenever replicas join, leave or
    restart.

    Args:
        backend: ``nccl`` or ``gloo``; None: ``nccl`` if this machine has a GPU.
        host: this machine's address, as the engines reach it.
        bucket_mb: MiB per broadcast.
        changed_only: send only buckets with a change, and load only modules that differ from what
            was sent last.
        adapters_only: send a LoRA's base once, and then its adapters alone.
        timeout_s: time limit for meeting, for each step of a push, and for each bucket.
    """

    def __init__(
        self,
        backend: str | None = None,
        host: str = "127.0.0.1",
        bucket_mb: float = 256.0,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        # With a copy: what one replica's death breaks off is sent again from it.
        super().__init__(backend, host, bucket_mb, True, changed_only, adapters_only, timeout_s)
        self._group: BroadcastGroup | None = None
        self._sent: dict[int, Any] = {}  # by slot; held until it is used again

    def route_to(self, engine: Engine) -> WeightTransport:
        if isinstance(engine, ReplicatedEngine):
            self._require_other_end(engine)
            return SharedPush(self, engine)
        return super().route_to(engine)

    def meet(self, replicas: list[Replica]) -> None:
        """Make a group of these replicas and this process.

        Raises:
            ReplicaLost: if one of them is gone.
            SyncTimeoutError: if they do not meet in time.
        """
        self.part()
        self._group = self._met(replicas)

    def send(self, bucket: Bucket) -> None:
        """Broadcast a bucket to the whole group; replicas answer their calls on receipt.

        Raises:
            SyncTimeoutError: if a replica is known to be gone.
        """
        assert self._group is not None
        self._sent[bucket["slot"]] = self._group.broadcast(self._staged_flat(bucket))

    def part(self) -> None:
        """Leave the group; its waiting members get an error at once."""
        group, self._group = self._group, None
        self._sent.clear()
        if group is not None:
            group.close_soon()

    def close(self) -> None:
        self.part()
        super().close()


class SharedPush(ReplicaPush):
    """Sends each bucket once, to all replicas together.

    Args:
        transport: stages and sends the weights.
        engine: the engine whose replicas get the weights.
    """

    transport: SharedCollectiveTransport

    def __init__(self, transport: SharedCollectiveTransport, engine: ReplicatedEngine) -> None:
        super().__init__(transport, engine)
        self._met: dict[Replica, int] = {}  # the life in which each came to the group

    def close(self) -> None:
        super().close()
        self._part()

    def _all_hold_what_is_kept(self, replicas: list[Replica]) -> bool:
        # In a new group they forget the base that they merge adapters into.
        keep = self._met == _lives(replicas) or not self._adapters_alone
        return keep and super()._all_hold_what_is_kept(replicas)

    def _deliver(
        self, replicas: list[Replica], buckets: Iterable[Bucket], version: int, complete: bool
    ) -> list[Replica]:
        if len(replicas) > 1:
            gone = self._deliver_together(replicas, buckets, version, complete)
            if gone is None:
                return replicas
            replicas = [replica for replica in replicas if replica not in gone]
        # Each gets a group of its own, and so takes no part in the other one any more.
        self._part()
        deque(buckets, maxlen=0)  # stages those that were not staged yet
        try:
            return super()._deliver(replicas, self._all_staged(), version, True)
        finally:
            self._leave_all()

    def _deliver_together(
        self, replicas: list[Replica], buckets: Iterable[Bucket], version: int, complete: bool
    ) -> list[Replica] | None:
        """Announce each bucket to all replicas, and send it once.

        Return None if all have loaded everything; else the replicas that died, as far as known.

        Raises:
            WeightSyncError: if a replica refuses.
        """
        timeout_s, loading = self.transport.timeout_s, list[Future[Any]]()

        def settle() -> None:
            # One that died tells at once; the others wait in a broadcast until it is given up.
            done, _ = wait(loading, return_when=FIRST_EXCEPTION)
            for answer in done:
                answer.result()

        def ask(question: Question) -> None:
            settle()
            loading[:] = [submit(question(replica)) for replica in replicas]

        try:
            if self._met != _lives(replicas):
                self._part()
                self.transport.meet(replicas)
                self._met = _lives(replicas)
            ask(lambda replica: replica.begin(timeout_s))
            for bucket in buckets:
                ask(self._telling(bucket, complete))
                self.transport.send(bucket)
            ask(self._telling(None, complete))
            ask(lambda replica: replica.set_version(version, timeout_s))
            settle()
        except (ReplicaLost, SyncTimeoutError) as error:
            _log.warning("weights go to each replica by itself: %s", first_line(error))
            self._part()
            return self._gone(dict(zip(replicas, loading, strict=False)))
        except BaseException:
            self._part()
            raise
        return None

    def _gone(self, answers: Answers) -> list[Replica]:
        """Return the replicas that died, after waiting until the others are idle."""
        wait(answers.values(), self.transport.timeout_s)
        gone = []
        for replica, answer in answers.items():
            error = answer.exception() if answer.done() else None
            if isinstance(error, ReplicaLost):
                gone.append(replica)
                self._lost(replica, error)
        return gone

    def _part(self) -> None:
        self._met = {}
        self.transport.part()


def _lives(replicas: list[Replica]) -> dict[Replica, int]:
    return {replica: replica.life for replica in replicas}
