"""EnvLoader: Lightning's view of batches of steps, one per iteration."""

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from lightning_rl.collect.loader import EpochLoader
from lightning_rl.envs.collector import EnvCollector
from lightning_rl.run.processes import dist


class EnvLoader(EpochLoader):
    """Batches of steps.

    The state is that of the collector before the batch that was not trained on yet: the same agents
    collect it again from there, bit by bit.

    Args:
        collect: called with the iteration's number.
        collector: whose state it keeps.
        length: iterations per epoch, as Lightning is told.
        epoch: how many of them the Trainer's own limits leave.
        trained: tells how many iterations have been trained on.
    """

    def __init__(
        self,
        collect: Callable[[int], TensorDict],
        collector: EnvCollector,
        length: int,
        epoch: int,
        trained: Callable[[], int],
    ) -> None:
        super().__init__(length, epoch, trained)
        self._collect = collect
        self._collector = collector
        self._before: dict[str, Any] = {}  # the collector's state before the last batch

    def next(self) -> TensorDict:
        self._before = self._collector.state_dict()
        return self._collect(self._trained())

    def own_state(self) -> dict[str, Any]:
        return {"collector": self._before if self.untrained else self._collector.state_dict()}

    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Other ranks, or more of them, begin new episodes."""
        if len(states) == dist.world_size():
            self._collector.load_state_dict(states[dist.rank()]["collector"])
