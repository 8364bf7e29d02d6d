"""Weight sync in memory, and the layout of weights in flat buffers."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle, groupby
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, DamagedWeightsError, require_at_least
from lightning_rl.sync.adapters import unit_of
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightReceiver, Weights, WeightStream

_ALIGNMENT = 64
"""In a flat buffer, each tensor starts at a multiple of so many elements."""


Arrived = tuple[Bucket, dict[str, Tensor]]
"""A bucket, and the weights that have come for it."""


def cut(weights: Weights, max_numel: int) -> Iterator[dict[str, Tensor]]:
    """Yield weights by at most ``max_numel`` elements, or those of a single larger unit."""
    part, numel = dict[str, Tensor](), 0
    for _, group in groupby(weights, key=lambda item: unit_of(item[0])):
        unit = dict(group)  # which an engine fuses, so it is not split
        size = sum(map(_aligned, unit.values()))
        if part and numel + size > max_numel:
            yield part
            part, numel = {}, 0
        part |= unit
        numel += size
    if part:
        yield part


def _aligned(weight: Tensor) -> int:
    return -(-weight.numel() // _ALIGNMENT) * _ALIGNMENT


def fill_buffers(
    weights: WeightStream,
    bucket_mb: float,
    keep_copy: bool,
    buffer: Callable[[int, int, torch.dtype, bool], Tensor],
) -> Iterator[tuple[Bucket, Tensor]]:
    """Copy weights to flat buffers, casting them on the way.

    Args:
        weights: the weights to copy.
        bucket_mb: MiB per buffer; a larger module gets a buffer of its own size.
        keep_copy: use one buffer for each bucket; else two buffers in turn.
        buffer: returns a buffer, given its number, number of elements and dtype, and whether it is
            read: then it must still have its previous content.

    Yields:
        A bucket's description for :func:`unpack`, and its buffer.
    """
    again = bool(weights.staged)
    for bucket, arrived in _as_before(weights) if again else _anew(weights, bucket_mb, keep_copy):
        is_read = weights.changed_only or len(arrived) < len(bucket["tensors"])
        flat = buffer(bucket["slot"], bucket["numel"], weights.dtype, is_read)
        changed = set()
        for name, held in unpack(flat, bucket):
            weight = arrived.get(name)
            if weight is None:  # it stays as it was staged before
                continue
            if not weights.changed_only or not torch.equal(held, weight.to(held)):
                held.copy_(weight)
                changed.add(unit_of(name))
        names = [name for name, *_ in bucket["tensors"] if unit_of(name) in changed]
        yield bucket | {"names": None if len(names) == len(bucket["tensors"]) else names}, flat


def _anew(weights: WeightStream, bucket_mb: float, keep_copy: bool) -> Iterator[Arrived]:
    """Yield new buckets with their weights."""
    slots: Iterable[int] = cycle((0, 1))  # one is loaded by the engines while the next is written
    if weights.kind == "adapters":
        slots = count(-1, -1)
    elif keep_copy:
        slots = count()
    max_numel = int(bucket_mb * 2**20) // weights.dtype.itemsize
    for slot, arrived in zip(slots, cut(weights, max_numel), strict=False):
        tensors, numel = [], 0  # name, shape and first element of each
        for name, weight in arrived.items():
            tensors.append((name, list(weight.shape), numel))
            numel += _aligned(weight)
        dtype = str(weights.dtype).removeprefix("torch.")
        bucket = {"slot": slot, "numel": numel, "tensors": tensors, "dtype": dtype, "names": None}
        yield bucket, arrived


def _as_before(weights: WeightStream) -> Iterator[Arrived]:
    """Yield the buckets of an earlier push for which weights come, with these."""
    buckets = {bucket["slot"]: bucket for bucket in weights.staged}
    slots = {name: slot for slot in buckets for name, *_ in buckets[slot]["tensors"]}
    for slot, arrived in groupby(weights, key=lambda item: slots[item[0]]):
        yield buckets[slot], dict(arrived)


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
        changed_only: send only modules that differ from what was sent last; needs ``keep_copy``.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: time limit of each step of a push, and of each bucket.
    """

    stages_in_memory = by_reference = leaves_out = True

    def __init__(
        self,
        bucket_mb: float = 256.0,
        keep_copy: bool = True,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(timeout_s, keep_copy, changed_only, adapters_only)
        require_at_least(0.001, bucket_mb=bucket_mb)
        self.bucket_mb = bucket_mb
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
        settings = self.changed_only, self.adapters_only, self.timeout_s
        return MemoryTransport(self.bucket_mb, self.keep_copy, *settings)

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        return SharedMemoryReceiver()

    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        for bucket, flat in fill_buffers(weights, self.bucket_mb, self.keep_copy, self._buffer):
            descriptor, _ = self._segments[bucket["slot"]]
            yield bucket | {"pid": os.getpid(), "descriptor": descriptor, "bytes": flat.nbytes}

    def close(self) -> None:
        super().close()
        for descriptor, _ in self._segments.values():
            os.close(descriptor)
        self._segments.clear()

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, _: bool) -> Tensor:
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
