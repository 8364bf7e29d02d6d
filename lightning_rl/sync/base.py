"""How weights get from the trainer to an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from lightning_rl.engines.base import Engine


class WeightTransport(ABC):
    """Carries weights to one engine."""

    @abstractmethod
    def connect(self, engine: Engine) -> None:
        """Get ready to push to ``engine``.

        Raises:
            ConfigError: if this transport cannot reach that kind of engine.
        """

    @abstractmethod
    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over all weights, under their Hugging Face names; done when the engine has them.

        Raises:
            WeightSyncError: if the engine does not take them.
        """

    def close(self) -> None:
        """Let go of the engine."""
