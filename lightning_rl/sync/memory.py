"""Weights handed over inside the process."""

from collections.abc import Iterable

from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.errors import WeightSyncError
from lightning_rl.sync.base import WeightTransport


class MemoryTransport(WeightTransport):
    """By reference to an engine in the same process, which copies them into its own."""

    _engine: Engine | None = None

    def connect(self, engine: Engine) -> None:
        self._engine = engine

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._engine is None:
            raise WeightSyncError("MemoryTransport.push before connect(engine)")
        self._engine.load_weights(weights, version)

    def close(self) -> None:
        self._engine = None
