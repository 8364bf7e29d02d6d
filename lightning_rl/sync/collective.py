"""Weight sync by broadcasts to all replicas of an engine together."""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError, first_line
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.group import (
    BroadcastGroup,
    BroadcastReceiver,
    require_backend,
    require_reachable,
)
from lightning_rl.sync.memory import fill, lay_out
from lightning_rl.sync.replicas import Answers, Delivery, ReplicaPush
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightPart, WeightReceiver, Weights

_log = logging.getLogger(__name__)


class AbsentError(SyncTimeoutError):
    """Some replicas did not come to a group."""

    def __init__(self, replicas: list[Replica], message: str) -> None:
        super().__init__(message)
        self.replicas = replicas


@configurable
class CollectiveTransport(StagedTransport):
    """Broadcasts to engines in other processes, also on other machines: NCCL on GPUs, gloo on CPUs.

    The trainer and all replicas are one group, besides the trainer's own groups: the trainer sends
    a bucket once (NCCL) or log2(replicas) times (gloo), and the replicas forward it. If a replica
    dies or hangs during a push, a new group of the others gets all of it again, from the copy;
    without a copy the push fails. A new group is also made whenever replicas join, leave or
    restart.

    Args:
        backend: ``nccl`` or ``gloo``; None: ``nccl`` if this machine has a GPU.
        host: this machine's address, as the engines reach it.
        bucket_mb: MiB per broadcast.
        keep_copy: keep all buckets in host memory, as much as the engine's weights, to repeat a
            push and to fill restarted replicas from. Otherwise two buckets are used in turn; with
            NCCL the GPU always holds only two.
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
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(timeout_s, keep_copy, adapters_only, bucket_mb)
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        require_backend(self.backend)
        self.host = host
        self._copies_to_host = keep_copy and self.backend == "nccl"
        self._copies: dict[int, Tensor] = {}
        self._on_device: dict[int, int] = {}  # which slot each of two buffers holds
        self._device = torch.device("cpu")
        self._buffers: dict[int, Tensor] = {}
        self._group: BroadcastGroup | None = None
        self._sending: dict[int, Any] = {}  # by slot, held until that is used again

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
        self._buffers.clear()
        self._copies.clear()
        self._on_device.clear()

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        return BroadcastReceiver(device, rank, **options)

    def stage(self, part: WeightPart) -> Bucket:
        bucket = lay_out(part, self.keep_copy)
        # Where frozen weights do not come again, the buffer has to hold them already.
        is_read = bucket["names"] is not None
        flat = self._buffer(bucket["slot"], bucket["numel"], part.dtype, is_read)
        fill(flat, bucket, part)
        if self._copies_to_host:
            # Page-locked memory, so that the copy goes on while the bucket is sent and loaded.
            copy = _at_least(self._copies, bucket["slot"], len(flat), flat.dtype, None)
            copy.copy_(flat, non_blocking=True)
        return bucket

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

    # ---------------------------------------------------------------- the group

    def meet(self, replicas: list[Replica]) -> None:
        """Make a group of this process and all workers of these replicas.

        Raises:
            AbsentError: if some of them are gone, or do not come in time.
            WeightSyncError: if one refuses.
        """
        self.part()
        options: dict[str, Any] = {
            "host": self.host,
            "size": 1 + sum(replica.workers for replica in replicas),
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }
        group = BroadcastGroup(port=0, rank=0, device=self._device, **options)
        joining: Answers = {}
        ranks, first = dict[Replica, range](), 1
        for replica in replicas:
            joining[replica] = self.invite(replica, port=group.port, first=first, **options)
            ranks[replica] = range(first, first + replica.workers)
            first += replica.workers
        try:
            group.meet(lambda: any(a.done() and a.exception() for a in joining.values()))
        except SyncTimeoutError as error:
            absent = set(group.absent())
            group.close()
            wait(joining.values(), self.timeout_s)
            errors = {r: a.exception() if a.done() else error for r, a in joining.items()}
            for refusal in errors.values():
                if refusal and not isinstance(refusal, ReplicaLost | SyncTimeoutError):
                    raise refusal from error
            dead = [r for r in replicas if isinstance(errors[r], ReplicaLost)]
            missing = dead or [r for r in replicas if absent & set(ranks[r])]
            names = ", ".join(replica.name for replica in missing or replicas)
            raise AbsentError(missing, f"{names}: {error}") from error
        for answer in joining.values():
            answer.result()
        self._group = group

    def broadcast(self, bucket: Bucket) -> None:
        """Broadcast a bucket to the group; replicas answer their calls on receipt.

        Raises:
            SyncTimeoutError: if a replica is known to be gone.
        """
        assert self._group is not None
        self._sending[bucket["slot"]] = self._group.broadcast(self._staged_flat(bucket))

    def part(self) -> None:
        """Leave the group; its waiting members get an error at once."""
        group, self._group = self._group, None
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
    """Sends each bucket once, to all replicas together.

    Args:
        transport: stages and sends the weights.
        engine: the engine whose replicas get the weights.
    """

    transport: CollectiveTransport

    def delivery(self, replicas: list[Replica], complete: bool) -> Delivery:
        return GroupDelivery(self, replicas, complete)

    def _hold_what_is_kept(self, replicas: list[Replica]) -> bool:
        # In a new group they forget the base that they merge adapters into.
        together = self.joined == _lives(replicas) or not self._adapters_alone
        return together and super()._hold_what_is_kept(replicas)

    def meet(self, replicas: list[Replica]) -> None:
        """Make a group of these replicas, unless they are one."""
        if self.joined != _lives(replicas):
            self.leave_all()
            self.transport.meet(replicas)
            self.joined.update(_lives(replicas))

    def leave_all(self) -> None:
        """Leave the group, if there is one."""
        self.joined.clear()
        self.transport.part()

    def close(self) -> None:
        super().close()
        self.leave_all()


class GroupDelivery(Delivery):
    """Brings buckets to replicas in one group; if some are lost, the others get all of them again.

    If it cannot be told which one is lost, each gets them by itself.
    """

    route: CollectivePush
    transport: CollectiveTransport
    _failed = _nobody_known = False

    def begin(self) -> None:
        def meet() -> None:
            self.route.meet(self.live)
            self._ask(lambda replica: replica.begin(self.timeout_s))

        self._attempt(meet)

    def send(self, bucket: Bucket) -> None:
        def broadcast() -> None:
            self._announce(bucket)
            self.transport.broadcast(bucket)

        self._attempt(broadcast)

    def finish(self, version: int) -> list[Replica]:
        self._attempt(lambda: Delivery.finish(self, version))
        if not self._failed:
            return self.live
        if not self.transport.keep_copy:
            return []
        groups = [[replica] for replica in self.live] if self._nobody_known else [self.live]
        return [r for group in groups if group for r in self.route.deliver_copy(group, version)]

    def _settle(self) -> None:
        # One that died tells at once; the others wait in a broadcast until it is given up.
        done, _ = wait(self._answers.values(), return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()

    def _attempt(self, step: Callable[[], object]) -> None:
        """Do a step with the group, unless it has failed; leave out replicas that are lost."""
        if self._failed:
            return
        try:
            step()
        except (ReplicaLost, SyncTimeoutError) as error:
            self._failed = True
            self.route.leave_all()
            lost = self._lost(error)
            self._nobody_known = not lost
            _log.warning("weights go to the other replicas again: %s", first_line(error))
            for replica, why in lost.items():
                self.live.remove(replica)
                self.route.lost(replica, why)

    def _lost(self, error: Exception) -> dict[Replica, Exception]:
        """Return the replicas that are known to be gone, once the others are idle."""
        if len(self.live) == 1:
            return {self.live[0]: error}
        if isinstance(error, AbsentError):
            return dict.fromkeys(error.replicas, error)
        wait(self._answers.values(), self.timeout_s)
        failures = {r: a.exception() for r, a in self._answers.items() if a.done()}
        return {r: e for r, e in failures.items() if isinstance(e, ReplicaLost)}


def _lives(replicas: list[Replica]) -> dict[Replica, int]:
    return {replica: replica.life for replica in replicas}
