"""How weights get from the trainer to an engine, and the short way to one in its own process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.engines.holdings import Holdings
from lightning_rl.engines.lora import divide
from lightning_rl.errors import ConfigError, WeightSyncError, WrongWeightsError
from lightning_rl.run.loop import run_async
from lightning_rl.sync.adapters import merged, seen_apart, weights_apart
from lightning_rl.sync.frozen import FrozenWeights
from lightning_rl.sync.sent import SentWeights
from lightning_rl.sync.stream import Weights

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Passage = Callable[[Weights, int], Weights]
"""What arrives of a version's weights."""


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

    def holdings(self, engine: Engine, names: Sequence[str]) -> list[Holdings]:
        """What the engine's processes hold under these names of a push."""
        return engine.holdings(names)

    def compare_with(self, sent: SentWeights) -> None:
        """Told what its pushes send, to compare with what it fills a process with later."""

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

    def holdings(self, engine: Engine, names: Sequence[str]) -> list[Holdings]:
        return self.route.holdings(engine, names)

    def compare_with(self, sent: SentWeights) -> None:
        self.route.compare_with(sent)

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


def push(
    transport: WeightTransport,
    engine: Engine,
    policy: "Policy",
    version: int,
    sent: SentWeights | None = None,
) -> int:
    """Pause the engine, push to it, let it go on. On several ranks call it on all of them.

    With ``sent`` it goes on only if all that it holds was sent; returns how many tensors were
    compared.

    Raises:
        WeightSyncError: if the engine does not take the weights, or holds others.
    """
    weights = iter(transport.weights_of(policy))
    try:
        if not drives_engine(engine):
            return 0
        run_async(engine.pause())
        try:
            if sent is None:
                transport.push(weights, version)
                return 0
            transport.compare_with(sent)
            noted = sent.noting(weights, engine, version)
            transport.push(noted, version)
            for _ in noted:  # a transport may know before the end that it has all
                pass
            return compare(transport, engine, sent)
        finally:
            run_async(engine.resume())
    finally:
        # Sharded weights are gathered by all ranks together: also by one that pushes nothing, or
        # that failed.
        for _ in weights:
            pass


def compare(transport: WeightTransport, engine: Engine, sent: SentWeights) -> int:
    """Raise unless the engine holds what it was sent; returns how many tensors were compared.

    Raises:
        WrongWeightsError: then the engine holds no version until the next push.
    """
    try:
        return sent.require_held(lambda names: transport.holdings(engine, names))
    except WrongWeightsError:
        engine.version = -1
        raise


# ---------------------------------------------------------------- in the trainer's process


def by_reference(weights: Weights, version: int) -> Weights:
    """The trainer's own tensors: nothing is copied."""
    return weights


class InProcess(WeightTransport):
    """All weights, a LoRA merged into them; frozen ones once, where the engine keeps them.

    Args:
        engine: that takes them.
        passage: the way that they go.
    """

    def __init__(self, engine: Engine, passage: Passage = by_reference) -> None:
        self.engine, self.passage = engine, passage
        self._frozen = FrozenWeights()
        self._pushed: int | None = None

    def weights_of(self, policy: "Policy") -> Weights:
        engine = self.engine
        kept = engine.keeps_left_out and self.passage is by_reference  # what is staged is whole
        holds = kept and engine.version == self._pushed
        return self._frozen.weights_of(policy, drives_engine(engine) and not holds)

    def push(self, weights: Weights, version: int) -> None:
        self.engine.load_weights(self.passage(weights, version), version)
        self._pushed = version


class AdaptersInProcess(InProcess):
    """Adapters as they are, to an engine that keeps them apart; and once their base."""

    def weights_of(self, policy: "Policy") -> Weights:
        return weights_apart(policy, drives_engine(self.engine) and self.engine.lacks_base)


class MergedInProcess(InProcess):
    """Adapters alone, merged here into a base that is kept: sharded, it is gathered only once."""

    def __init__(self, engine: Engine, passage: Passage = by_reference) -> None:
        super().__init__(engine, passage)
        self._base: dict[str, Tensor] = {}  # by reference
        self._adapters: dict[str, Tensor] = {}

    def weights_of(self, policy: "Policy") -> Weights:
        return weights_apart(policy, drives_engine(self.engine) and not self._base)

    def push(self, weights: Weights, version: int) -> None:
        adapters, base = divide(weights)
        self._base.update(base or ())
        self._adapters = dict(self.passage(adapters.items(), version))
        self.engine.load_weights(merged(self._base, self._adapters.items()), version)

    def holdings(self, engine: Engine, names: Sequence[str]) -> list[Holdings]:
        dtype = getattr(torch, engine.dtype)
        return [
            replace(held, digests=seen_apart(held.digests, self._base, self._adapters, dtype))
            for held in engine.holdings(names)
        ]


def route_in_process(
    engine: Engine, adapters_only: bool, passage: Passage = by_reference
) -> InProcess:
    """What pushes to an engine in this process."""
    if engine.takes_adapters:
        return AdaptersInProcess(engine, passage)
    return MergedInProcess(engine, passage) if adapters_only else InProcess(engine, passage)
