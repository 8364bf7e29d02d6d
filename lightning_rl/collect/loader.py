"""Loaders for Lightning: sized plain iterables that yield one batch per RL iteration."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from lightning.pytorch import Trainer
from tensordict import TensorDict

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.validation import whole
from lightning_rl.errors import RewardError
from lightning_rl.rollout import Rollout
from lightning_rl.run.processes import dist


class EpochLoader(ABC):
    """A sized plain iterable that collects lazily, and can be resumed at any point.

    It is not a ``DataLoader``, so that Lightning collects after ``on_train_epoch_start`` in every
    epoch, never prefetches, and keeps ``state_dict`` in its checkpoints. A batch that was yielded
    but not trained on is yielded again after a resume.

    Args:
        length: iterations per epoch, as reported to Lightning.
        epoch: how many of them remain under the Trainer's own limits.
        trained: returns how many iterations have been trained on.
    """

    def __init__(self, length: int, epoch: int, trained: Callable[[], int]) -> None:
        self._length = length
        self._epoch = epoch
        self._trained = trained
        self._place = 0  # batches of this epoch that were begun
        self._due = 0  # the last of them is trained on once this many iterations are

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        # Lightning takes as many batches as the length says, and leaves the iterator at its last
        # yield. So an epoch's end is tidied up here, at the start of the next.
        self._place %= self._epoch
        while self._place < self._epoch:
            self._place, self._due = self._place + 1, self._trained() + 1
            with dist.every_rank():
                batch = self.next()
            yield batch

    @property
    def untrained(self) -> bool:
        """True while the most recent batch has not been trained on."""
        return self._trained() < self._due

    @abstractmethod
    def next(self) -> TensorDict:
        """Collect the next batch."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return this rank's state except its place in the epoch; primitives and tensors only."""

    @abstractmethod
    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume from the ``own_state`` of every rank, whose number may have changed since."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every rank's loader, since a single rank writes the checkpoint."""
        position = self._place - self.untrained
        return {"ranks": dist.gather({"place": position} | self.own_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken."""
        self._place = state["ranks"][0]["place"]  # the same on all ranks
        self.load_own_states(state["ranks"])


class Resumable(Protocol):
    """Something whose state a checkpoint holds, and from which any number of ranks can resume."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_shares(self, states: Sequence[dict[str, Any]], /) -> None: ...


class RolloutLoader(EpochLoader):
    """Packed batches of graded rollouts.

    The state holds the source's state, and the rollouts that were collected but not yet trained on.

    Args:
        collect: called with the iteration's number; returns its graded rollouts.
        source: what ``collect`` draws from; its state is part of the loader's.
        length: iterations per epoch, as reported to Lightning.
        trained: returns how many iterations have been trained on.
        epoch: how many of them remain under the Trainer's own limits; None: all.
        roles: names of the roles, in the order of their numbers in a batch; see
            :func:`pack_rollouts`.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        source: Resumable,
        length: int,
        trained: Callable[[], int],
        epoch: int | None = None,
        roles: Sequence[str] = (),
    ) -> None:
        super().__init__(length, length if epoch is None else epoch, trained)
        self._roles = roles
        self._collect = collect
        self._source = source
        self.first = trained()  # a second fit goes on counting, and so with other seeds
        self._collected = self.first
        self.current: list[Rollout] = []
        """The rollouts of the last batch, including those that were not packed."""
        self._pending: list[Rollout] = []  # the same, while it is not being replaced
        self._restored: list[Rollout] = []  # from a checkpoint, to be handed out first

    def next(self) -> TensorDict:
        self._pending = []
        if not self._restored:
            self._restored = self._collect(self._collected)
            self._collected += 1
        self.current, self._restored = self._restored, []
        batch = pack_rollouts(trainable(self.current), self.current, self._roles)
        self._pending = self.current
        return batch

    def own_state(self) -> dict[str, Any]:
        pending = self._restored or (self._pending if self.untrained else [])
        return {
            "source": self._source.state_dict(),
            "first": self.first,
            "collected": self._collected,
            "pending": [r.to_dict() for r in pending],
        }

    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Yield the pending rollouts first, redistributed if the number of ranks has changed."""
        self._source.load_shares([state["source"] for state in states])
        self.first, self._collected = states[0]["first"], states[0]["collected"]
        groups = dist.reshard(
            [_in_groups(state["pending"]) for state in states], dist.rank(), dist.world_size()
        )
        self._restored = [Rollout.from_dict(whole(r)) for group in groups for r in group]


def limited_epoch(trainer: Trainer, length: int) -> int:
    """Return how many of an epoch's iterations ``limit_train_batches`` and ``overfit_batches``
    leave.
    """
    limit = trainer.limit_train_batches
    return min(limit, length) if isinstance(limit, int) else int(length * limit)


class LazyLoader:
    """A sized plain iterable that calls ``make`` with 0, 1, ... when each batch is due."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._length))


def _in_groups(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(records, lambda record: record["group_id"])]


def trainable(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts that were completed and graded.

    Raises:
        RewardError: if there are none.
    """
    kept = [r for r in rollouts if r.graded]
    if not kept:
        first = next((r.error for r in rollouts if r.error), "all were aborted")
        raise RewardError(
            f"none of {len(rollouts)} rollouts can be trained on; first error: {first}", rollouts
        )
    return kept
