"""EnvLoader: Lightning's view of batches of steps, one per iteration."""

from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict

from lightning_rl.envs.collector import EnvCollector
from lightning_rl.run import dist


class EnvLoader:
    """A sized plain iterable that collects lazily.

    Its state is that of the collector before whatever was not trained on yet: the same agents
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
        self._collect = collect
        self._collector = collector
        self._length = length
        self._epoch = epoch
        self._trained = trained
        self._place = 0  # iterations of this epoch that were handed out
        self._due = 0  # trained on, once this many iterations are
        self._before: dict[str, Any] | None = None  # what was handed out last

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        self._place %= self._epoch
        while self._place < self._epoch:
            iteration = self._trained()
            with dist.every_rank():
                self._before, self._due = self._collector.state_dict(), iteration + 1
                self._place += 1
                batch = self._collect(iteration)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's loader; primitives and tensors only."""
        return {"ranks": dist.gather(self._own_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; other ranks, or more of them, begin new episodes."""
        shares = state["ranks"]
        self._place = shares[0]["place"]
        if len(shares) == dist.world_size():
            self._collector.load_state_dict(shares[dist.rank()]["collector"])

    def _own_state(self) -> dict[str, Any]:
        untrained = self._before is not None and self._trained() < self._due
        state = self._before if untrained else self._collector.state_dict()
        return {"place": self._place - untrained, "collector": state}
