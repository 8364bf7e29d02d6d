"""Weight sync by broadcasts, to all replicas of an engine together or to each by itself."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError, first_line, require_at_least
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.group import (
    BroadcastGroup,
    BroadcastReceiver,
    require_backend,
    require_reachable,
)
from lightning_rl.sync.memory import fill_buffers
from lightning_rl.sync.replicas import Answers, Question, ReplicaPush, submit
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightReceiver, Weights, WeightStream

_log = logging.getLogger(__name__)


@configurable
class CollectiveTransport(StagedTransport):
    """Broadcasts to engines in other processes, also on other machines: NCCL on GPUs, gloo on CPUs.

    The trainer and all replicas are one group, besides the trainer's own groups: the trainer sends
    a bucket once (NCCL) or log2(replicas) times (gloo), and the replicas forward it. If a replica
    dies or hangs during a push, the push is repeated with a group for each remaining replica; the
    next push uses a single group again. A new group is made whenever replicas join, leave or
    restart.

    Without a copy, which a push is repeated from, each replica has a group of its own at all times:
    the trainer sends all weights once per replica, and the others go on if one dies.

    Args:
        backend: ``nccl`` or ``gloo``; None: ``nccl`` if this machine has a GPU.
        host: this machine's address, as the engines reach it.
        bucket_mb: MiB per broadcast.
        keep_copy: keep all buckets in host memory, as much as the engine's weights, to repeat a
            push and to fill restarted replicas from. Otherwise two buckets are used in turn; with
            NCCL the GPU always holds only two.
        changed_only: send only buckets with a change, and load only modules that differ from what
            was sent last; needs ``keep_copy``.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: time limit for meeting, for each step of a push, and for each bucket.
    """

    stages_in_memory = leaves_out = True
    shared_packages = ("lightning_rl", "torch")  # other torch versions meet in another way
    reaches = (ReplicatedEngine,)
    instead = (
        "that engine is in the trainer's own process: use MemoryTransport or CheckpointTransport"
    )

    def __init__(
        self,
        backend: str | None = None,
        host: str = "127.0.0.1",
        bucket_mb: float = 256.0,
        keep_copy: bool = True,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(timeout_s, keep_copy, changed_only, adapters_only)
        require_at_least(0.001, bucket_mb=bucket_mb)
        self.bucket_mb = bucket_mb
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        require_backend(self.backend)
        self.host = host
        self._copies_to_host = keep_copy and self.backend == "nccl"
        self._copies: dict[int, Tensor] = {}
        self._on_device: dict[int, int] = {}  # which slot each of two buffers holds
        self._device = torch.device("cpu")
        self._groups: dict[Replica, BroadcastGroup] = {}
        self._buffers: dict[int, Tensor] = {}
        self._shared: BroadcastGroup | None = None
        # Held until the slot is used again; None: to all replicas together.
        self._sending: dict[tuple[int, Replica | None], Any] = {}

    @property
    def gpu_bytes(self) -> int:
        return 2 * int(self.bucket_mb * 2**20) if self.backend == "nccl" else 0

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        assert isinstance(engine, ReplicatedEngine)
        require_reachable(self, self.host, engine)
        if self.backend == "nccl":
            # Asked here, for a thread that fills a restarted replica has a current device too: 0.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def push(self, weights: Weights, version: int) -> None:
        super().push(weights, version)
        if self._copies_to_host and self._device.type == "cuda":
            # Another thread may read the copies, and the weights are about to change.
            torch.cuda.current_stream(self._device).synchronize()

    def route_to(self, engine: Engine) -> WeightTransport:
        assert isinstance(engine, ReplicatedEngine)
        self._require_other_end(engine)
        return CollectivePush(self, engine)

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._sending.clear()
        self._buffers.clear()
        self._copies.clear()
        self._on_device.clear()

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        return BroadcastReceiver(device, rank, **options)

    def join(self, replica: Replica) -> None:
        self.leave(replica)
        self._groups[replica] = self._met([replica])

    def _met(self, replicas: Sequence[Replica]) -> BroadcastGroup:
        """Return a group of this process and all workers of these replicas, once they have met.

        Raises:
            SyncTimeoutError: if they do not meet in time.
        WeightSyncError: if a replica refuses.
        """
        options: dict[str, Any] = {
            "host": self.host,
            "size": 1 + sum(replica.workers for replica in replicas),
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }
        group = BroadcastGroup(port=0, rank=0, device=self._device, **options)
        joining, first = [], 1
        for replica in replicas:
            joining.append(self.invite(replica, port=group.port, first=first, **options))
            first += replica.workers
        refusals: list[Future[Any]] = []

        def refused() -> bool:
            refusals.extend(answer for answer in joining if answer.done() and answer.exception())
            return bool(refusals)

        try:
            group.meet(refused)
        except SyncTimeoutError as error:
            group.close()
            for answer in [*refusals, *joining]:
                answer.result()  # says why, if the replica is gone or has refused
            names = ", ".join(replica.name for replica in replicas)
            raise SyncTimeoutError(f"{names}: {error}") from error
        for answer in joining:
            answer.result()
        return group

    def leave(self, replica: Replica) -> None:
        if (group := self._groups.pop(replica, None)) is not None:
            group.close_soon()

    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        for bucket, flat in fill_buffers(weights, self.bucket_mb, self.keep_copy, self._buffer):
            if self._copies_to_host:
                # Page-locked memory, so that the copy goes on while the bucket is sent and loaded.
                copy = _at_least(self._copies, bucket["slot"], len(flat), flat.dtype, None)
                copy.copy_(flat, non_blocking=True)
            yield bucket

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, is_read: bool) -> Tensor:
        if not self._copies_to_host:
            return _at_least(self._buffers, slot, numel, dtype, self._device)
        flat = _at_least(self._buffers, slot % 2, numel, dtype, self._device)
        if is_read and slot in self._copies:  # what was sent last
            flat.copy_(self._copies[slot][:numel], non_blocking=True)
        self._on_device[slot % 2] = slot
        return flat

    def _staged_flat(self, bucket: Bucket) -> Tensor:
        """Return a bucket's buffer; for a restarted replica, with the bucket's last content."""
        slot, numel = bucket["slot"], bucket["numel"]
        if not self._copies_to_host:
            return self._buffers[slot][:numel]
        if self._on_device.get(slot % 2) != slot:
            return self._buffer(slot, numel, getattr(torch, bucket["dtype"]), is_read=True)
        return self._buffers[slot % 2][:numel]

    def transmit(self, bucket: Bucket, replica: Replica) -> None:
        flat = self._staged_flat(bucket)
        # Nobody waits here: a replica answers its call when it has received all.
        try:
            self._sending[bucket["slot"], replica] = self._groups[replica].broadcast(flat)
        except SyncTimeoutError as error:
            raise SyncTimeoutError(f"{replica.name}: {error}") from error

    # ---------------------------------------------------------------- all replicas together

    def meet(self, replicas: list[Replica]) -> None:
        """Make a group of these replicas and this process.

        Raises:
            ReplicaLost: if one of them is gone.
            SyncTimeoutError: if they do not meet in time.
        """
        self.part()
        self._shared = self._met(replicas)

    def send(self, bucket: Bucket) -> None:
        """Broadcast a bucket to the whole group; replicas answer their calls on receipt.

        Raises:
            SyncTimeoutError: if a replica is known to be gone.
        """
        assert self._shared is not None
        self._sending[bucket["slot"], None] = self._shared.broadcast(self._staged_flat(bucket))

    def part(self) -> None:
        """Leave the group; its waiting members get an error at once."""
        group, self._shared = self._shared, None
        if group is not None:
            self._sending.clear()
            group.close_soon()


def _at_least(
    held: dict[int, Tensor],
    number: int,
    numel: int,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Tensor:
    """Return the first ``numel`` elements of a held buffer, which is remade if it is too small.

    ``device`` None: in host memory, page-locked if there are GPUs.
    """
    buffer = held.get(number)
    if buffer is None or buffer.dtype != dtype or len(buffer) < numel:
        pinned = device is None and torch.cuda.is_available()
        held[number] = buffer = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
    return buffer[:numel]


class CollectivePush(ReplicaPush):
    """Sends each bucket once, to all replicas together; after a loss, to each by itself.

    Args:
        transport: stages and sends the weights.
        engine: the engine whose replicas get the weights.
    """

    transport: CollectiveTransport

    def __init__(self, transport: CollectiveTransport, engine: ReplicatedEngine) -> None:
        super().__init__(transport, engine)
        self._met: dict[Replica, int] = {}  # the life in which each came to the group

    def close(self) -> None:
        super().close()
        self._part()

    def _all_hold_what_is_kept(self, replicas: list[Replica]) -> bool:
        lives = _lives(replicas)
        together = self._together(replicas)
        met = self._met == lives if together else lives.items() <= self._joined.items()
        # In a new group they forget the base that they merge adapters into.
        return (met or not self._adapters_alone) and super()._all_hold_what_is_kept(replicas)

    def _together(self, replicas: list[Replica]) -> bool:
        """Tell if they share a group: what one of them breaks off is sent again from the copy."""
        return len(replicas) > 1 and self.transport.keep_copy

    def _deliver(
        self, replicas: list[Replica], buckets: Iterable[Bucket], version: int, complete: bool
    ) -> list[Replica]:
        if self._together(replicas):
            gone = self._deliver_together(replicas, buckets, version, complete)
            if gone is None:
                return replicas
            replicas = [replica for replica in replicas if replica not in gone]
            deque(buckets, maxlen=0)  # stages those that were not staged yet
            buckets, complete = self._all_staged(), True
        self._part()  # who has a group of its own takes no part in the other one any more
        return super()._deliver(replicas, buckets, version, complete)

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
                self._leave_all()
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
