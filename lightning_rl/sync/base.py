"""How weights get from the trainer to an engine: what all transports have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_rl.config.hints import import_object
from lightning_rl.engines.base import Engine, checked, drives_engine
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.run.loop import run_async

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Weights = Iterable[tuple[str, Tensor]]
Kind = Literal["weights", "base", "adapters"]
Bucket = dict[str, Any]
"""Some weights, and where they are: primitives only, for it travels as JSON."""


class WeightTransport(ABC):
    """Carries weights to one engine."""

    reaches: ClassVar[tuple[type[Engine], ...]] = (Engine,)
    """Kinds of engines that it can reach."""
    instead: ClassVar[str] = ""
    """What to choose for the others."""

    def connect(self, engine: Engine) -> None:
        """Get ready to push to ``engine``.

        Raises:
            ConfigError: if this transport cannot reach that kind of engine.
        """
        if not isinstance(engine, self.reaches):
            raise ConfigError(
                f"{type(self).__name__} cannot reach {type(engine).__name__}; {self.instead}"
            )

    def for_policy(self, name: str) -> "WeightTransport":
        """Another one with the same settings, for one of several policies.

        Raises:
            ConfigError: if it carries those of one policy only.
        """
        raise ConfigError(
            f"{type(self).__name__} carries the weights of one policy; with several use "
            "MemoryTransport or CheckpointTransport"
        )

    def use_scratch(self, scratch: bool) -> None:
        """Told before each run whether it is a fast dev run, which leaves nothing on disk."""

    def weights_of(self, policy: "Policy") -> Weights:
        """What to push of a policy: all weights, a LoRA merged into them."""
        return policy.named_weights()

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        """What it keeps in the host's memory between pushes to ``engine``, of so many weights."""
        return 0

    @property
    def gpu_bytes(self) -> int:
        """What it takes of rank 0's GPU beside the weights."""
        return 0

    @abstractmethod
    def push(self, weights: Weights, version: int) -> None:
        """Hand over all weights, under their Hugging Face names; done when the engine has them.

        Raises:
            WeightSyncError: if the engine does not take them.
        """

    def close(self) -> None:
        """Let go of the engine."""


class RoutedTransport(WeightTransport):
    """Chooses its route when it is connected: what reaches that kind of engine."""

    _route: WeightTransport | None = None

    @abstractmethod
    def route_to(self, engine: Engine) -> WeightTransport:
        """What pushes to ``engine``."""

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        self._route = self.route_to(engine)

    def weights_of(self, policy: "Policy") -> Weights:
        return self.route.weights_of(policy)

    def push(self, weights: Weights, version: int) -> None:
        self.route.push(weights, version)

    def close(self) -> None:
        if self._route is not None:
            self._route.close()
            self._route = None

    @property
    def route(self) -> WeightTransport:
        """What it is connected by.

        Raises:
            WeightSyncError: before ``connect``.
        """
        if self._route is None:
            raise WeightSyncError(f"{type(self).__name__}.push before connect(engine)")
        return self._route


def push(transport: WeightTransport, engine: Engine, policy: "Policy", version: int) -> None:
    """Pause the engine, push to it, let it go on. On several ranks call it on all of them.

    Raises:
        WeightSyncError: if the engine does not take the weights.
    """
    weights = iter(transport.weights_of(policy))
    try:
        if not drives_engine(engine):
            return
        run_async(engine.pause())
        try:
            transport.push(weights, version)
        finally:
            run_async(engine.resume())
    finally:
        # Sharded weights are gathered by all ranks together: also by one that pushes nothing, or
        # that failed.
        for _ in weights:
            pass


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


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shape of each."""
    return {name: weight.shape for name, weight in weights.items()}


def receiver_of(transport: str, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
    """In a worker: the other end of the transport of this import path."""
    try:
        cls = import_object(transport)
    except ConfigError as error:
        raise WeightSyncError(f"the engine's process cannot import its end: {error}") from error
    receiver: WeightReceiver = cls.receiver(device, rank, **options)
    return receiver
