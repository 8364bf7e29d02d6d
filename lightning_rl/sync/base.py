"""Transports of weights from the trainer to an engine, and those to one in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.engines.lora import divide
from lightning_rl.engines.push import HeldDigests, Push
from lightning_rl.errors import ConfigError, WrongWeightsError
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.adapters import merged, seen_apart, weights_apart
from lightning_rl.sync.frozen import FrozenWeights
from lightning_rl.sync.sent import SentWeights
from lightning_rl.sync.stream import Weights

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Passage = Callable[[Weights, int], Weights]
"""Carries a version's weights to the engine, and returns them as they arrive."""


class WeightTransport(ABC):
    """Carries weights to one engine."""

    reaches: ClassVar[tuple[type[Engine], ...]] = (Engine,)
    """Engine classes that it can reach."""
    instead: ClassVar[str] = ""
    """What to use for other engines; part of an error message."""

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
        """Return a transport with the same settings, for one of several policies.

        Raises:
            ConfigError: if this transport supports one policy only.
        """
        raise ConfigError(
            f"{type(self).__name__} carries the weights of one policy; with several policies use "
            "MemoryTransport or CheckpointTransport"
        )

    def use_scratch(self, scratch: bool) -> None:
        """Prepare for a run; ``scratch`` is True for a fast dev run, which leaves no files."""

    def weights_of(self, policy: "Policy") -> Weights:
        """Return the weights of a policy to push: all of them, with a LoRA merged."""
        return policy.named_weights()

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        """Return the bytes of host memory kept between pushes of ``elements`` weights."""
        return 0

    @property
    def gpu_bytes(self) -> int:
        """Bytes of rank 0's GPU memory that it uses besides the weights."""
        return 0

    @abstractmethod
    def push(self, weights: Weights, version: int) -> None:
        """Push all weights, under their Hugging Face names; return when the engine has them.

        Raises:
            WeightSyncError: if the engine does not take them.
        """

    def held_digests(self, engine: Engine, names: Sequence[str]) -> list[HeldDigests]:
        """Return what the engine's processes hold under these names of a push."""
        return engine.held_digests(names)

    def close(self) -> None:
        """Disconnect from the engine."""


def push(
    transport: WeightTransport,
    engine: Engine,
    policy: "Policy",
    version: int,
    sent: SentWeights | None = None,
) -> int:
    """Pause the engine, push to it, and resume it. With several ranks, all must call it.

    With ``sent``, check that the engine holds exactly what was sent. Return how many tensors were
    compared.

    Raises:
        WeightSyncError: if the engine does not take the weights, or holds other ones.
    """
    weights = Push.of(transport.weights_of(policy))
    try:
        if not drives_engine(engine):
            return 0
        run_async(engine.pause())
        try:
            if sent is None:
                transport.push(weights, version)
                return 0
            sent.begin(engine, version)
            weights.ledger = sent
            transport.push(weights, version)
            weights.exhaust()  # what the engine did not take is compared, too
            sent.end()
            return compare(transport, engine, sent)
        finally:
            run_async(engine.resume())
    finally:
        weights.ledger = None
        weights.exhaust()  # what this rank does not push, it still has to gather with the others


def compare(transport: WeightTransport, engine: Engine, sent: SentWeights) -> int:
    """Check that the engine holds what it was sent; return how many tensors were compared.

    Raises:
        WrongWeightsError: if not; the engine then has no valid version until the next push.
    """
    try:
        return sent.require_held(lambda names: transport.held_digests(engine, names))
    except WrongWeightsError:
        engine.version = -1
        raise


# ---------------------------------------------------------------- in the trainer's process


class InProcess(WeightTransport):
    """Pushes all weights, with a LoRA merged; frozen ones only once if the engine keeps them.

    To an engine that keeps adapters separate, it pushes them unmerged, and their base once.

    Args:
        engine: the engine to push to.
        passage: carries the weights; None: the engine gets the trainer's own tensors.
    """

    def __init__(self, engine: Engine, passage: Passage | None = None) -> None:
        self.engine, self.passage = engine, passage
        self._frozen = FrozenWeights()
        self._pushed: int | None = None

    def weights_of(self, policy: "Policy") -> Weights:
        engine = self.engine
        if engine.takes_adapters:
            return weights_apart(policy, drives_engine(engine) and engine.lacks_base)
        kept = engine.keeps_skipped_weights and self.passage is None  # what is staged is whole
        holds = kept and engine.version == self._pushed
        return self._frozen.weights_of(policy, drives_engine(engine) and not holds)

    def push(self, weights: Weights, version: int) -> None:
        self.engine.load_weights(self.passed(weights, version), version)
        self._pushed = version

    def passed(self, weights: Weights, version: int) -> Weights:
        """Return weights as they arrive."""
        return weights if self.passage is None else self.passage(weights, version)


class MergedInProcess(InProcess):
    """Merges adapters here into a kept base, so that a sharded base is gathered only once."""

    def __init__(self, engine: Engine, passage: Passage | None = None) -> None:
        super().__init__(engine, passage)
        self._base: dict[str, Tensor] = {}  # by reference
        self._adapters: dict[str, Tensor] = {}

    def weights_of(self, policy: "Policy") -> Weights:
        return weights_apart(policy, drives_engine(self.engine) and not self._base)

    def push(self, weights: Weights, version: int) -> None:
        adapters, base = divide(weights)
        self._base.update(base or ())
        self._adapters = dict(self.passed(adapters.items(), version))
        self.engine.load_weights(merged(self._base, self._adapters.items()), version)

    def held_digests(self, engine: Engine, names: Sequence[str]) -> list[HeldDigests]:
        dtype = getattr(torch, engine.dtype)
        return [
            replace(held, digests=seen_apart(held.digests, self._base, self._adapters, dtype))
            for held in engine.held_digests(names)
        ]
