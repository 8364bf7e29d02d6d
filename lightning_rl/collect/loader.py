"""RolloutLoader: Lightning's view of collection, one batch per RL iteration."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from lightning.pytorch import Trainer
from tensordict import TensorDict

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import RewardError
from lightning_rl.rollout import Rollout
from lightning_rl.run import dist


class Resumable(Protocol):
    """What a checkpoint can hold, and any number of ranks go on from."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_shares(self, states: Sequence[dict[str, Any]], /) -> None: ...


class RolloutLoader:
    """A sized plain iterable that collects lazily.

    Plain, because Lightning then collects after ``on_train_epoch_start`` in every epoch, never
    prefetches, and keeps ``state_dict`` in its checkpoints. The state holds the source's, the place
    in the epoch, and rollouts that were collected but not trained on yet.

    Args:
        collect: called with the iteration's number; returns its graded rollouts.
        source: what ``collect`` draws on; its state is part of the loader's.
        length: iterations per epoch, as Lightning is told.
        epoch: how many of them the Trainer's own limits leave; None: all.
        trained: tells how many iterations have been trained on.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        source: Resumable,
        length: int,
        trained: Callable[[], int],
        epoch: int | None = None,
    ) -> None:
        self._collect = collect
        self._source = source
        self._length = length
        self._epoch = length if epoch is None else epoch
        self._trained = trained
        self.first = trained()  # a second fit goes on counting, and so with other seeds
        self._collected = self.first
        self._place = 0  # iterations of this epoch that were handed out
        self._current: list[Rollout] = []  # what was handed out last
        self._due = 0  # trained on, once this many iterations are
        self._restored: list[Rollout] = []  # from a checkpoint, to be handed out first

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        # Lightning takes as many batches as the length says, and leaves the iterator at its last
        # yield. So an epoch's end is tidied up here, at the start of the next.
        self._place %= self._epoch
        while self._place < self._epoch:
            with dist.every_rank():
                self._current = self._restored or self._collect_next()
                self._restored = []
                batch = pack_rollouts(trainable(self._current))
            self._place += 1
            self._due = self._trained() + 1
            yield batch

    def _collect_next(self) -> list[Rollout]:
        rollouts = self._collect(self._collected)
        self._collected += 1
        return rollouts

    @property
    def current(self) -> list[Rollout]:
        """The rollouts that the last batch was made of, and those it left out."""
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's loader, since one rank writes the checkpoint; primitives only.

        An iteration that was cut short, in either half, is still to come.
        """
        return {"ranks": dist.gather(self._own_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, first with the rollouts that were pending then.

        If there were more ranks, or fewer, their rollouts are dealt out anew, group by group.
        """
        shares = state["ranks"]
        self._source.load_shares([share["source"] for share in shares])
        # These are the same on all ranks.
        self.first, self._collected = shares[0]["first"], shares[0]["collected"]
        self._place = shares[0]["place"]
        groups = dist.reshard(
            [_in_groups(share["pending"]) for share in shares], dist.rank(), dist.world_size()
        )
        self._restored = [Rollout.from_dict(record) for group in groups for record in group]

    def _own_state(self) -> dict[str, Any]:
        untrained = bool(self._current) and self._trained() < self._due
        pending = self._restored or (self._current if untrained else [])
        return {
            "source": self._source.state_dict(),
            "first": self.first,
            "collected": self._collected,
            "place": self._place - 1 if pending and not self._restored else self._place,
            "pending": [r.to_dict() for r in pending],
        }


def limited_epoch(trainer: Trainer, length: int) -> int:
    """How many of an epoch's iterations ``limit_train_batches`` and ``overfit_batches`` leave."""
    limit = trainer.limit_train_batches
    return min(limit, length) if isinstance(limit, int) else int(length * limit)


class LazyLoader:
    """A sized plain iterable: calls ``make`` with 0, 1, ... when each batch is due."""

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
    """Those that were completed and graded.

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
