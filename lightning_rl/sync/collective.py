"""Weights broadcast in a process group."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError, require_at_least
from lightning_rl.sync.broadcast import BroadcastGroup, require_backend
from lightning_rl.sync.memory import fill_buffers, unpack
from lightning_rl.sync.transport import (
    Bucket,
    StagedTransport,
    WeightReceiver,
    Weights,
    WeightStream,
)


class BroadcastReceiver(WeightReceiver):
    """A process group; the sender broadcasts."""

    def __init__(self, device: torch.device, rank: int, **options: Any) -> None:
        super().__init__(self._fetch)
        self._device = device
        self._group = BroadcastGroup(rank=1 + rank, device=device, **options)
        self._group.meet()
        self._buffer = torch.empty(0)

    def _fetch(self, bucket: Bucket) -> Weights:
        dtype, numel = getattr(torch, bucket["dtype"]), bucket["numel"]
        if self._buffer.dtype != dtype or self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=dtype, device=self._device)
        flat = self._buffer[:numel]
        self._group.wait(self._group.broadcast(flat))
        return unpack(flat, bucket)

    def fail(self) -> None:
        self._group.close()

    def close(self) -> None:
        self._group.close()


@configurable
class CollectiveTransport(StagedTransport):
    """Broadcasts to engines in other processes, also on other machines: NCCL on GPUs, gloo on CPUs.

    Each replica and the trainer have a group of their own (beside the trainer's own groups), so
    that one which dies or hangs takes no other with it; a restarted one joins anew.

    Args:
        backend: ``nccl`` or ``gloo``; None: by whether this machine has a GPU.
        host: this machine's address, as the engines reach it.
        bucket_mb: MiB per broadcast.
        keep_copy: keep all buckets, from which a restarted replica is filled: as much memory of
            the host as the engine's weights. Otherwise two buckets, used in turn; with NCCL that is
            what is on the GPU in any case.
        changed_only: send only buckets with a change, and load only modules that differ from what
            was sent last; needs ``keep_copy``.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: for meeting, for each step of a push, and each bucket.
    """

    stages_in_memory = True
    reaches = (ReplicatedEngine,)
    instead = "it is in the trainer's own process: use MemoryTransport or CheckpointTransport"

    def __init__(
        self,
        backend: str | None = None,
        host: str = "127.0.0.1",
        bucket_mb: float = 64.0,
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
        # Held until the slot is used again.
        self._sending: dict[tuple[int, Replica], Any] = {}

    @property
    def gpu_bytes(self) -> int:
        return 2 * int(self.bucket_mb * 2**20) if self.backend == "nccl" else 0

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if self.backend == "nccl":
            # Asked here, for a thread that fills a restarted replica has a current device too: 0.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def push(self, weights: Weights, version: int) -> None:
        super().push(weights, version)
        if self._copies_to_host and self._device.type == "cuda":
            # Another thread may read the copies, and the weights are about to change.
            torch.cuda.current_stream(self._device).synchronize()

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

    def _join(self, replica: Replica) -> None:
        self._leave(replica)
        options: dict[str, Any] = {
            "host": self.host,
            "size": 1 + replica.workers,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }
        group = BroadcastGroup(port=0, rank=0, device=self._device, **options)
        joining = self._invite(replica, port=group.port, **options)
        try:
            group.meet()
        except SyncTimeoutError as error:
            group.close()
            joining.result()  # says why, if the replica is gone or has refused
            raise SyncTimeoutError(f"{replica.name}: {error}") from error
        joining.result()
        self._groups[replica] = group

    def _leave(self, replica: Replica) -> None:
        if (group := self._groups.pop(replica, None)) is not None:
            # Not here: gloo would wait until a send to a process that hangs has timed out.
            threading.Thread(target=group.close, name="leave_group", daemon=True).start()

    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        for bucket, flat in fill_buffers(weights, self.bucket_mb, self.keep_copy, self._buffer):
            if self._copies_to_host:
                # Page-locked memory, so that the copy goes on while the bucket is sent and loaded.
                copy = _at_least(self._copies, bucket["slot"], len(flat), flat.dtype, None)
                copy.copy_(flat, non_blocking=True)
            yield bucket

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        if not self._copies_to_host:
            return _at_least(self._buffers, slot, numel, dtype, self._device)
        flat = _at_least(self._buffers, slot % 2, numel, dtype, self._device)
        if slot in self._copies:  # what was sent last, to compare with
            flat.copy_(self._copies[slot][:numel], non_blocking=True)
        self._on_device[slot % 2] = slot
        return flat

    def _staged_flat(self, bucket: Bucket) -> Tensor:
        """A bucket's buffer, for a restarted replica with what was sent of it."""
        slot, numel = bucket["slot"], bucket["numel"]
        if not self._copies_to_host:
            return self._buffers[slot][:numel]
        if self._on_device.get(slot % 2) != slot:
            return self._buffer(slot, numel, getattr(torch, bucket["dtype"]))
        return self._buffers[slot % 2][:numel]

    def _transmit(self, bucket: Bucket, replica: Replica) -> None:
        flat = self._staged_flat(bucket)
        # Nobody waits here: a replica answers its call when it has received all.
        try:
            self._sending[bucket["slot"], replica] = self._groups[replica].broadcast(flat)
        except SyncTimeoutError as error:
            raise SyncTimeoutError(f"{replica.name}: {error}") from error


def _at_least(
    held: dict[int, Tensor],
    number: int,
    numel: int,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Tensor:
    """The first elements of a buffer that is held, or made if it is too small.

    ``device`` None: in the host's memory, page-locked where there are GPUs.
    """
    buffer = held.get(number)
    if buffer is None or buffer.dtype != dtype or len(buffer) < numel:
        pinned = device is None and torch.cuda.is_available()
        held[number] = buffer = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
    return buffer[:numel]
