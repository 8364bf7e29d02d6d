"""Parts of a push on their way to an engine's processes, and the receivers there."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.config.hints import import_object
from lightning_rl.engines.lora import is_adapter
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.run.processes.machine import installed_version
from lightning_rl.sync.adapters import unit_of

Weights = Iterable[tuple[str, Tensor]]
Kind = Literal["weights", "base", "adapters"]
Bucket = dict[str, Any]
"""A part that is staged, and where: primitives only, because it is sent as JSON."""
ALIGNMENT = 64
"""In a flat buffer, each tensor starts at a multiple of so many elements."""


class WeightReceiver:
    """The receiving end of a transport, in a worker of an engine: fetches buckets of weights.

    Args:
        fetch: returns a bucket's weights, by their Hugging Face names; valid until the next call.
    """

    def __init__(self, fetch: Callable[[Bucket], Weights]) -> None:
        self.fetch = fetch

    def fail(self) -> None:
        """Handle a bucket that could not be loaded: release a sender that may be waiting."""

    def close(self) -> None:
        """Free everything."""


@dataclass
class WeightPart:
    """Some whole modules of a push, which are staged, sent and loaded together.

    Args:
        weights: weights in the policy's dtype, by their Hugging Face names.
        dtype: dtype in which they should arrive.
        version: version of the push.
        kind: ``adapters`` of a LoRA, its ``base``, or ``weights``: those of a policy without one.
        number: number of the part among those of its kind, from 0.
        before: the bucket of an earlier push that these weights belong to, in which the others stay
            as they are; None: a new bucket.
    """

    weights: dict[str, Tensor]
    dtype: torch.dtype
    version: int
    kind: Kind
    number: int = 0
    before: Bucket | None = None


def parts_of(
    weights: Weights,
    dtype: torch.dtype,
    version: int,
    bucket_mb: float,
    before: Sequence[tuple[Bucket, Collection[str]]] = (),
) -> Iterator[WeightPart]:
    """Divide a push into parts: adapters in float32, which come first, and the rest in ``dtype``.

    A part has at most ``bucket_mb`` MiB; a larger module has one of its own, because engines fuse
    the weights of a module, so that it is never split.

    Args:
        weights: the weights of the push, those of a module one after another.
        dtype: the engine's dtype.
        version: version of the push.
        bucket_mb: MiB per part.
        before: buckets of an earlier push, with the names of their weights, if frozen weights do
            not come again: each part then has the weights that belong to one of them.
    """
    place_of = {name: place for place, (_, names) in enumerate(before) for name in names}

    def unit(item: tuple[str, Tensor]) -> tuple[bool, int | None, str]:
        name = item[0]
        return is_adapter(name), place_of.get(name), unit_of(name)

    part: WeightPart | None = None
    room, adapted = 0, False
    for (adapters, place, _), group in groupby(weights, unit):
        module = dict(group)
        size = sum(map(aligned, module.values()))
        adapted |= adapters
        kind: Kind = "adapters" if adapters else "base" if adapted else "weights"
        number = 0
        if place is not None:
            number = place
        elif part is not None and part.kind == kind:
            number = part.number if size <= room else part.number + 1
        if part is None or (part.kind, part.number) != (kind, number):
            if part is not None:
                yield part
            arrives = torch.float32 if adapters else dtype
            room = int(bucket_mb * 2**20) // arrives.itemsize
            part = WeightPart({}, arrives, version, kind, number)
            part.before = None if place is None else before[place][0]
        part.weights |= module
        room -= size
    if part is not None:
        yield part


def aligned(weight: Tensor) -> int:
    """Return the elements that a weight takes in a flat buffer."""
    return -(-weight.numel() // ALIGNMENT) * ALIGNMENT


def minor_version(package: str) -> str:
    """Return the installed version of a package up to its minor number, such as ``2.13``."""
    return ".".join((installed_version(package) or "none").split(".")[:2])


def receiver_of(
    transport: str,
    device: torch.device,
    rank: int,
    versions: Mapping[str, str] | None = None,
    **options: Any,
) -> WeightReceiver:
    """Make, in a worker, the receiver of the transport with this import path.

    ``versions`` holds the sender's minor versions of the packages that both ends must share.

    Raises:
        WeightSyncError: if a version differs, or the transport cannot be imported.
    """
    for package, theirs in (versions or {}).items():
        if (ours := minor_version(package)) != theirs:
            raise WeightSyncError(
                f"the trainer has {package} {theirs} and the engine {ours}, which cannot exchange "
                f"weights by {transport.rpartition('.')[2]}; install the same version on both sides"
            )
    try:
        cls = import_object(transport)
    except ConfigError as error:
        raise WeightSyncError(f"the engine cannot import the transport: {error}") from error
    receiver: WeightReceiver = cls.receiver(device, rank, **options)
    return receiver
