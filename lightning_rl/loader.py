"""RolloutLoader: Lightning's view of collection, one batch per RL iteration."""

from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import RewardError
from lightning_rl.rollout import Rollout, RolloutStatus


class RolloutLoader:
    """A sized plain iterable that collects lazily.

    Plain, because Lightning then collects after ``on_train_epoch_start`` in every epoch, never
    prefetches, and keeps ``state_dict`` in its checkpoints. The state holds the prompt cursor, the
    place in the epoch, and rollouts that were collected but not trained on yet.

    Args:
        collect: called with the iteration's number; returns its graded rollouts.
        prompts: the dataset whose cursor is part of the state.
        length: iterations per epoch.
        trained: tells how many iterations have been trained on.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        prompts: PromptDataset,
        length: int,
        trained: Callable[[], int],
    ) -> None:
        self._collect = collect
        self._prompts = prompts
        self._length = length
        self._trained = trained
        self._collected = 0
        self._place = 0  # iterations of this epoch that were handed out
        self._pending: list[Rollout] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        while self._place < self._length:
            if not self._pending:
                self._pending = self._collect(self._collected)
                self._collected += 1
            batch = pack_rollouts(trainable(self._pending))
            self._place += 1
            yield batch
            self._pending = []
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        """Primitives only. A batch whose training was interrupted counts as not handed out."""
        untrained = bool(self._pending) and self._trained() < self._collected
        return {
            "prompts": self._prompts.state_dict(),
            "collected": self._collected,
            "place": self._place - 1 if untrained else self._place,
            "pending": [r.to_dict() for r in self._pending] if untrained else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, first with the rollouts that were pending then."""
        self._prompts.load_state_dict(state["prompts"])
        self._collected = state["collected"]
        # A checkpoint at an epoch's end leaves nothing of that epoch: start the next one.
        self._place = state["place"] % self._length
        self._pending = [Rollout.from_dict(record) for record in state["pending"]]


def trainable(rollouts: list[Rollout]) -> list[Rollout]:
    """Those that were completed and graded.

    Raises:
        RewardError: if there are none.
    """
    kept = [r for r in rollouts if r.status is RolloutStatus.COMPLETED and r.reward is not None]
    if not kept:
        first = next((r.error for r in rollouts if r.error), "all were aborted")
        raise RewardError(f"none of {len(rollouts)} rollouts can be trained on; first error: {first}")
    return kept
