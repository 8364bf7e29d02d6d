"""The receiving end of each transport: where an engine's worker takes a bucket of weights from."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_rl.errors import DamagedWeightsError
from lightning_rl.sync.group import Group

Bucket = dict[str, Any]
"""What the sender says of a bucket: primitives only, for it travels as JSON."""


class Source(ABC):
    """Made by a worker when a transport connects.

    Args:
        device: of the worker's model.
        rank: of the worker among those of its engine.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.rank = rank

    @abstractmethod
    def fetch(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """The bucket's weights, under their Hugging Face names; valid until the next call.

        Raises:
            DamagedWeightsError: if they are not what the sender wrote.
        """

    def fail(self) -> None:
        """A bucket could not be loaded: let go of a sender that may be waiting for us."""

    def close(self) -> None:
        """Free everything."""


def unpack(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Views of a flat buffer: ``tensors`` are name, shape and first element."""
    for name, shape, start in bucket["tensors"]:
        size = torch.Size(shape)
        yield name, flat[start : start + size.numel()].view(size)


class SharedMemorySource(Source):
    """Memory of a sender on the same machine; it is mapped, not copied."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._mapped: dict[str, tuple[int, Tensor]] = {}  # inode, bytes

    def fetch(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        path = f"/proc/{bucket['pid']}/fd/{bucket['descriptor']}"
        return unpack(self._map(path, bucket["bytes"], getattr(torch, bucket["dtype"])), bucket)

    def _map(self, path: str, size: int, dtype: torch.dtype) -> Tensor:
        try:
            found = os.stat(path)
        except OSError as error:
            raise DamagedWeightsError(
                f"the trainer's shared memory is out of reach ({error}): is the engine on another "
                "machine, in another container, or another user's? Use CheckpointTransport or "
                "CollectiveTransport"
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


class FileSource(Source):
    """A safetensors file on a file system that both sides see."""

    def fetch(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        return read_weights(bucket["path"], bucket["version"], bucket["names"])


def read_weights(path: str, version: int, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """Stream a file's weights, or some of them.

    Raises:
        DamagedWeightsError: if the file is missing, cut short, or of another version.
    """
    name = Path(path).name  # vLLM blots out whole paths in what it tells
    try:
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("version")
            if written != str(version):
                raise DamagedWeightsError(f"{name} holds version {written} instead of {version}")
            for weight in list(file.keys()) if names is None else names:
                yield weight, file.get_tensor(weight)
    except (SafetensorError, OSError) as error:
        raise DamagedWeightsError(f"{name} cannot be read: {error}") from error


class GroupSource(Source):
    """A process group; the sender broadcasts."""

    def __init__(self, device: torch.device, rank: int, **options: Any) -> None:
        super().__init__(device, rank)
        self._group = Group(rank=1 + rank, device=device, **options)
        self._group.meet()
        self._buffer = torch.empty(0)

    def fetch(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        dtype, numel = getattr(torch, bucket["dtype"]), bucket["numel"]
        if self._buffer.dtype != dtype or self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=dtype, device=self.device)
        flat = self._buffer[:numel]
        self._group.wait(self._group.broadcast(flat))
        return unpack(flat, bucket)

    def fail(self) -> None:
        self._group.close()

    def close(self) -> None:
        self._group.close()


SOURCES: dict[str, type[Source]] = {
    "memory": SharedMemorySource,
    "file": FileSource,
    "group": GroupSource,
}
