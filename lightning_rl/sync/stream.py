"""What travels to an engine's processes, and their end of the way."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.config.hints import import_object
from lightning_rl.engines.base import checked
from lightning_rl.engines.lora import divide, require_adapters
from lightning_rl.errors import ConfigError, WeightSyncError

Weights = Iterable[tuple[str, Tensor]]
Kind = Literal["weights", "base", "adapters"]
Bucket = dict[str, Any]
"""Some weights, and where they are: primitives only, for it travels as JSON."""


class WeightReceiver:
    """The other end of a transport: takes buckets of weights, in a worker of an engine.

    Args:
        fetch: gives a bucket's weights, under their Hugging Face names; valid until the next call.
    """

    def __init__(self, fetch: Callable[[Bucket], Weights]) -> None:
        self.fetch = fetch

    def fail(self) -> None:
        """A bucket could not be loaded: let go of a sender that may be waiting for us."""

    def close(self) -> None:
        """Free everything."""


@dataclass
class WeightStream:
    """The weights of a push, one at a time; each is checked against ``shapes`` as it passes.

    They come in the policy's dtype, and should arrive in ``dtype``. ``kind`` tells all weights, or
    the base of a LoRA, from adapters, which go alone; ``changed_only``, that only what differs from
    what was staged last need be loaded.
    """

    weights: Weights
    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    version: int
    kind: Kind = "weights"
    changed_only: bool = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return checked(self.weights, self.shapes)


def streams_of(
    weights: Weights,
    shapes: Mapping[str, torch.Size] | None,
    dtype: torch.dtype,
    version: int,
    changed_only: bool = False,
) -> Iterator[WeightStream]:
    """A push, as it is staged: adapters first, for they are merged into the base as that arrives.

    ``shapes``: of all but adapters; None: as they come, for which all of them have to be there.
    """
    adapters, others = divide(weights)
    if adapters and shapes is not None:
        require_adapters(adapters, shapes)
    if adapters:
        yield WeightStream(adapters.items(), _shapes(adapters), torch.float32, version, "adapters")
    if others is not None:
        kind: Kind = "base" if adapters else "weights"
        if shapes is None:
            held = dict(others)
            others, shapes = iter(held.items()), _shapes(held)
        yield WeightStream(others, shapes, dtype, version, kind, changed_only)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def receiver_of(transport: str, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
    """In a worker: the other end of the transport of this import path."""
    try:
        cls = import_object(transport)
    except ConfigError as error:
        raise WeightSyncError(f"the engine's process cannot import its end: {error}") from error
    receiver: WeightReceiver = cls.receiver(device, rank, **options)
    return receiver
