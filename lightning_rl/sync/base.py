"""How weights get from the trainer to an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from lightning_rl.engines.base import Engine, feeds_engine
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop import run_async


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

    @property
    def keeps_on_gpu(self) -> bool:
        """Whether rank 0's GPU keeps a copy of all that was sent."""
        return False

    def use_scratch(self, scratch: bool) -> None:
        """Told before each run whether it is a fast dev run, which leaves nothing on disk."""

    def weights_of(self, policy: Policy) -> Iterable[tuple[str, Tensor]]:
        """What to push of a policy: all weights, a LoRA merged into them."""
        return policy.named_weights()

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        """What it keeps in the host's memory between pushes to ``engine``, of so many weights."""
        return 0

    @abstractmethod
    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over all weights, under their Hugging Face names; done when the engine has them.

        Raises:
            WeightSyncError: if the engine does not take them.
        """

    def close(self) -> None:
        """Let go of the engine."""


def push(transport: WeightTransport, engine: Engine, policy: Policy, version: int) -> None:
    """Pause the engine, push to it, let it go on. On several ranks call it on all of them.

    Raises:
        WeightSyncError: if the engine does not take the weights.
    """
    weights = iter(transport.weights_of(policy))
    try:
        if not feeds_engine(engine):
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
