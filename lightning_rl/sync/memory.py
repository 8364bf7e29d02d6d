"""Weight sync in memory, and the layout of weights in flat buffers."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, DamagedWeightsError
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightPart, WeightReceiver, Weights, aligned


def lay_out(part: WeightPart, keep_copy: bool) -> Bucket:
    """Return where each weight of a part lies in a flat buffer: as before, or one after another.

    With ``keep_copy``, each part has a buffer of its own, numbered by ``slot``; else weights take
    two in turn, one of which is loaded by the engines while the next is written.
    """
    if part.before is not None:
        whole = len(part.weights) == len(part.before["tensors"])
        return part.before | {"names": None if whole else list(part.weights)}
    tensors, numel = [], 0  # name, shape and first element of each
    for name, weight in part.weights.items():
        tensors.append((name, list(weight.shape), numel))
        numel += aligned(weight)
    slot = part.number if keep_copy else part.number % 2
    return {
        "slot": -1 - part.number if part.kind == "adapters" else slot,
        "numel": numel,
        "tensors": tensors,
        "dtype": str(part.dtype).removeprefix("torch."),
        "names": None,
    }


def fill(flat: Tensor, bucket: Bucket, part: WeightPart) -> None:
    """Copy a part's weights to their places in a flat buffer, casting them on the way."""
    for name, held in unpack(flat, bucket):
        held.copy_(part.weights[name])


def unpack(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield a flat buffer's weights as views: all, or those with the bucket's ``names``."""
    for name, shape, start in bucket["tensors"]:
        if bucket["names"] is None or name in bucket["names"]:
            size = torch.Size(shape)
            yield name, flat[start : start + size.numel()].view(size)


class SharedMemoryReceiver(WeightReceiver):
    """Maps the memory of a sender on the same machine, without a copy."""

    def __init__(self) -> None:
        super().__init__(self._fetch)
        self._mapped: dict[str, tuple[int, Tensor]] = {}  # inode, bytes

    def _fetch(self, bucket: Bucket) -> Weights:
        path = f"/proc/{bucket['pid']}/fd/{bucket['descriptor']}"
        return unpack(self._map(path, bucket["bytes"], getattr(torch, bucket["dtype"])), bucket)

    def _map(self, path: str, size: int, dtype: torch.dtype) -> Tensor:
        try:
            found = os.stat(path)
        except OSError as error:
            raise DamagedWeightsError(
                f"the trainer's shared memory cannot be reached ({error}): is the engine on "
                "another machine, in another container, or another user's? Use CheckpointTransport "
                "or CollectiveTransport"
            ) from error
        if found.st_size < size:
            raise DamagedWeightsError(f"{path} holds {found.st_size} bytes instead of {size}")
        inode, memory = self._mapped.get(path, (-1, torch.empty(0)))
        if inode != found.st_ino:  # a descriptor's number may come to stand for another memory
            memory = torch.from_file(path, shared=True, size=found.st_size, dtype=torch.uint8)
            self._mapped[path] = found.st_ino, memory
        return memory[:size].view(dtype)

    def close(self) -> None:
        self._mapped.clear()


@configurable
class MemoryTransport(StagedTransport):
    """Passes weights by reference to an engine in this process, else through shared memory.

    The arguments matter only for engines in other processes, which must be on this machine. Shared
    memory has no name in the file system, and is freed when the last process that uses it ends,
    however it ends.

    Args:
        bucket_mb: MiB to copy before the engines start to load them.
        keep_copy: keep all buckets, as much memory as the engine's weights, to fill restarted
            replicas from. Otherwise two buckets are used in turn.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: time limit of each step of a push, and of each bucket.
    """

    stages_in_memory = by_reference = leaves_out = True

    def __init__(
        self,
        bucket_mb: float = 256.0,
        keep_copy: bool = True,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(timeout_s, keep_copy, adapters_only, bucket_mb)
        self._segments: dict[int, tuple[int, Tensor]] = {}  # descriptor, bytes

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if isinstance(engine, ReplicatedEngine):
            for replica in engine.replicas:
                if not replica.on_this_machine:
                    raise ConfigError(
                        f"MemoryTransport cannot reach {replica.name} on another machine; use "
                        "CollectiveTransport, or CheckpointTransport on a shared file system"
                    )

    def for_policy(self, name: str) -> "MemoryTransport":
        settings = self.keep_copy, self.adapters_only, self.timeout_s
        return MemoryTransport(self.bucket_mb, *settings)

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        return SharedMemoryReceiver()

    def stage(self, part: WeightPart) -> Bucket:
        bucket = lay_out(part, self.keep_copy)
        descriptor, flat = self._buffer(bucket["slot"], bucket["numel"], part.dtype)
        fill(flat, bucket, part)
        return bucket | {"pid": os.getpid(), "descriptor": descriptor, "bytes": flat.nbytes}

    def close(self) -> None:
        super().close()
        for descriptor, _ in self._segments.values():
            os.close(descriptor)
        self._segments.clear()

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return a slot's shared memory, with its descriptor."""
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
        return descriptor, memory[:size].view(dtype)
