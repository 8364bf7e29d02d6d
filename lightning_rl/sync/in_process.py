"""Weights to an engine in the trainer's own process: it takes them as they come, one at a time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_rl.engines.adapters import divide
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.sync.adapters import merged, weights_apart
from lightning_rl.sync.base import Weights, WeightTransport

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy

Passage = Callable[[Weights, int], Weights]
"""What arrives of a version's weights."""


def by_reference(weights: Weights, version: int) -> Weights:
    """The trainer's own tensors: nothing is copied."""
    return weights


class InProcess(WeightTransport):
    """All weights, a LoRA merged into them.

    Args:
        engine: that takes them.
        passage: the way that they go.
    """

    def __init__(self, engine: Engine, passage: Passage = by_reference) -> None:
        self.engine, self.passage = engine, passage

    def push(self, weights: Weights, version: int) -> None:
        self.engine.load_weights(self.passage(weights, version), version)


class AdaptersInProcess(InProcess):
    """Adapters as they are, to an engine that keeps them apart; and once their base."""

    def weights_of(self, policy: "Policy") -> Weights:
        return weights_apart(policy, drives_engine(self.engine) and self.engine.lacks_base)


class MergedInProcess(InProcess):
    """Adapters alone, merged here into a base that is kept: sharded, it is gathered only once."""

    def __init__(self, engine: Engine, passage: Passage = by_reference) -> None:
        super().__init__(engine, passage)
        self._base: dict[str, Tensor] = {}  # by reference

    def weights_of(self, policy: "Policy") -> Weights:
        return weights_apart(policy, drives_engine(self.engine) and not self._base)

    def push(self, weights: Weights, version: int) -> None:
        adapters, base = divide(weights)
        self._base.update(base or ())
        arrived = self.passage(adapters.items(), version)
        self.engine.load_weights(merged(self._base, arrived), version)


def route_in_process(
    engine: Engine, adapters_only: bool, passage: Passage = by_reference
) -> InProcess:
    """What pushes to an engine in this process."""
    if engine.takes_adapters:
        return AdaptersInProcess(engine, passage)
    return MergedInProcess(engine, passage) if adapters_only else InProcess(engine, passage)
