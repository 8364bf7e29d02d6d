"""Weights broadcast in a process group."""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import SyncTimeoutError
from lightning_rl.sync.group import Group, require_backend
from lightning_rl.sync.sources import Bucket
from lightning_rl.sync.staged import StagedTransport


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

    source = "group"
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
        super().__init__(bucket_mb, keep_copy, changed_only, adapters_only, timeout_s)
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        require_backend(self.backend)
        self.host = host
        self._copies_to_host = keep_copy and self.backend == "nccl"
        self._copies: dict[int, Tensor] = {}
        self._on_device: dict[int, int] = {}  # which slot each of two buffers holds
        self._device = torch.device("cpu")
        self._groups: dict[Replica, Group] = {}
        self._buffers: dict[int, Tensor] = {}
        # Held until the slot is used again.
        self._sending: dict[tuple[int, Replica], Any] = {}

    @property
    def keeps_on_gpu(self) -> bool:
        return self.keep_copy and self.backend == "nccl"

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if self.backend == "nccl":
            # Asked here, for a thread that fills a restarted replica has a current device too: 0.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
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

    def _join(self, replica: Replica) -> None:
        self._leave(replica)
        size = 1 + replica.workers
        group = Group(self.host, 0, 0, size, self.backend, self.timeout_s, self._device)
        options = {
            "host": self.host,
            "port": group.port,
            "size": size,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }
        info = {"source": self.source, "options": options}
        joining = self._ask(replica, "init_weight_transfer_engine", init_info=info)
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

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._copies_to_host:
            return _at_least(self._buffers, slot, numel, dtype, self._device)
        flat = _at_least(self._buffers, slot % 2, numel, dtype, self._device)
        if slot in self._copies:  # what was sent last, to compare with
            flat.copy_(self._copies[slot][:numel], non_blocking=True)
        self._on_device[slot % 2] = slot
        return flat

    def _place(self, slot: int, flat: Tensor) -> Bucket:
        if self._copies_to_host:
            # Page-locked memory, so that the copy goes on while the bucket is sent and loaded.
            copy = _at_least(self._copies, slot, len(flat), flat.dtype, None)
            copy.copy_(flat, non_blocking=True)
        return {}

    def _staged(self, bucket: Bucket) -> Tensor:
        """A bucket's buffer, for a restarted replica with what was sent of it."""
        slot, numel = bucket["slot"], bucket["numel"]
        if not self._copies_to_host:
            return self._buffers[slot][:numel]
        if self._on_device.get(slot % 2) != slot:
            return self._buffer(slot, numel, getattr(torch, bucket["dtype"]), self._device)
        return self._buffers[slot % 2][:numel]

    def _transmit(self, bucket: Bucket, replica: Replica) -> None:
        flat = self._staged(bucket)
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
