"""Streams of weights to an engine's processes, and the receivers there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.config.hints import import_object
from lightning_rl.engines.lora import divide, require_adapters
from lightning_rl.engines.push import Push
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.run.processes.machine import installed_version

Weights = Iterable[tuple[str, Tensor]]
Kind = Literal["weights", "base", "adapters"]
Bucket = dict[str, Any]
"""Some weights, and where they are: primitives only, because it is sent as JSON."""


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
class WeightStream:
    """The weights of a push, one at a time; each is checked against ``shapes`` as it passes.

    They come in the policy's dtype, and should arrive in ``dtype``. ``kind`` distinguishes all
    weights, a LoRA's base, and adapters alone; with ``changed_only``, only weights that differ from
    what was staged last need to be loaded. Frozen weights may be missing that were staged before:
    ``staged`` then has the buckets of that push, where they still are.
    """

    weights: Weights
    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    version: int
    kind: Kind = "weights"
    changed_only: bool = False
    staged: Sequence[Bucket] = ()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return Push.of(self.weights).checked(self.shapes)


def streams_of(
    weights: Weights,
    shapes: Mapping[str, torch.Size] | None,
    dtype: torch.dtype,
    version: int,
    changed_only: bool = False,
) -> Iterator[WeightStream]:
    """Yield a push's streams: adapters first, because they are merged into the arriving base.

    ``shapes``: those of all weights but adapters; None: take the weights' own, by holding them all.
    """
    coming = Push.of(weights)
    adapters, others = divide(coming)
    if adapters and shapes is not None:
        require_adapters(adapters, shapes)
    if adapters:
        yield WeightStream(adapters.items(), _shapes(adapters), torch.float32, version, "adapters")
    if others is not None:
        kind: Kind = "base" if adapters else "weights"
        if shapes is None:
            held = dict(others)
            others, shapes = iter(held.items()), _shapes(held)
        rest = Push(others, coming.kept)
        yield WeightStream(rest, shapes, dtype, version, kind, changed_only)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


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
