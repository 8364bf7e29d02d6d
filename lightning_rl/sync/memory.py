"""Weights handed over in memory."""

import os

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError
from lightning_rl.sync.sources import Bucket
from lightning_rl.sync.staged import StagedTransport

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@configurable
class MemoryTransport(StagedTransport):
    """By reference to an engine in this process; through shared memory to others on this machine.

    The arguments matter only for engines in other processes. Shared memory has no name in the file
    system and is gone when the last process that uses it is, however that ends.

    Args:
        bucket_mb: MiB that are copied before the engines start to load them.
        keep_copy: keep all buckets, from which a restarted replica is filled: as much memory as the
            engine's weights. Otherwise two buckets, used in turn.
        changed_only: send only modules that differ from what was sent last; needs ``keep_copy``.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: for each step of a push, and each bucket.
    """

    source = "memory"

    def __init__(
        self,
        bucket_mb: float = 256.0,
        keep_copy: bool = True,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(bucket_mb, keep_copy, changed_only, adapters_only, timeout_s)
        self._segments: dict[int, tuple[int, Tensor]] = {}  # descriptor, bytes

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if isinstance(engine, ReplicatedEngine):
            for replica in engine.replicas:
                if replica.host not in THIS_MACHINE:
                    raise ConfigError(
                        f"MemoryTransport cannot reach {replica.name} on another machine; use "
                        "CollectiveTransport, or CheckpointTransport on a shared file system"
                    )

    def close(self) -> None:
        super().close()
        for descriptor, _ in self._segments.values():
            os.close(descriptor)
        self._segments.clear()

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = numel * dtype.itemsize
        descriptor, memory = self._segments.get(slot, (-1, torch.empty(0)))
        if len(memory) < size:
            if descriptor >= 0:
                os.close(descriptor)
            descriptor = os.memfd_create("lightning_rl_weights", os.MFD_CLOEXEC)
            os.truncate(descriptor, size)
            path = f"/proc/self/fd/{descriptor}"
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self._segments[slot] = descriptor, memory
        return memory[:size].view(dtype)

    def _place(self, slot: int, flat: Tensor) -> Bucket:
        descriptor = self._segments[slot][0]
        return {"pid": os.getpid(), "descriptor": descriptor, "bytes": flat.nbytes}
