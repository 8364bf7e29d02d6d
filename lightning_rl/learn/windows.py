"""Batches of fixed rows for Lightning: trained in windows of an optimizer step, or held out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.run.processes.dist import all_sum, rank, world_size
from lightning_rl.run.seeding import permutation, random_state

SCALE = "scale"
"""Key of the factor of a batch's summed loss: 0 for a batch that stands in for one without rows."""

Make = Callable[[Sequence[int], Sequence[int]], TensorDict]
"""Makes a batch from the order of all rows, and the places in it of the batch's own."""


class HeldOut:
    """A sized plain iterable of batches in the rows' own order, dealt to the ranks.

    Every row is in exactly one batch of one rank. All ranks have equally many batches; one that
    would be empty repeats a row, with a scale of 0.

    Args:
        rows: the number of rows.
        batch_size: rows per batch and rank.
        make: makes a batch.
    """

    def __init__(self, rows: int, batch_size: int, make: Make) -> None:
        self.rows = rows
        self._across = batch_size * world_size()
        self._make = make

    def __len__(self) -> int:
        return -(-self.rows // self._across)

    def __iter__(self) -> Iterator[TensorDict]:
        order = range(self.rows)
        for first in range(0, self.rows, self._across):
            batch, counts = self.share(order, first)
            yield batch.set(SCALE, torch.tensor(float(counts)))

    def share(self, order: Sequence[int], first: int) -> tuple[TensorDict, bool]:
        """Return this rank's part of the batch that begins at a place, and whether it counts."""
        last = min(first + self._across, self.rows)
        places = range(first, last)[rank() :: world_size()]
        return self._make(order, places or [first]), bool(places)


class Windows(HeldOut):
    """Batches in an order that seed and epoch fix, and from any of which a run can resume.

    A *window* is all batches between two optimizer steps, of all ranks. The batches of a window are
    made together, so that each knows what the sum of the window's losses is to be divided by: its
    ``scale`` is ranks x accumulate_grad_batches / (total weight of the window), of which Lightning
    and the averaging of gradients over ranks take back the numerator. How rows are cut into batches
    then changes nothing.

    The state is the row at which the window begins that was not trained on yet. So a run resumes on
    any number of ranks, and a checkpoint within a window goes back to the window's start.

    Args:
        rows: the number of rows.
        batch_size: rows per batch and rank.
        make: makes a batch.
        seed: seed of the orders; None: the rows' own order in every epoch.
        weigh: returns what a batch adds to the total weight of its window.
        steps: returns how many optimizer steps have been taken.
        accumulate: returns how many batches a window has at present.
        limit: returns the number of batches in an epoch, given that of all batches.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        make: Make,
        seed: int | None,
        weigh: Callable[[TensorDict], Tensor],
        steps: Callable[[], int],
        accumulate: Callable[[], int],
        limit: Callable[[int], int],
    ) -> None:
        super().__init__(rows, batch_size, make)
        self._seed = seed
        self._weigh = weigh
        self._steps = steps
        self._accumulate = accumulate
        self._last = limit(len(self))  # of the batches of an epoch
        self.epoch = 0
        self._begin = self._end = 0  # rows: of the latest window
        self._due = 0  # it is trained on once this many steps were taken
        self.window: list[TensorDict] = []
        """The batches of the latest window of this rank, on the CPU."""
        self.random = random_state()
        """This rank's random generators as they were when the latest window began."""

    @property
    def untrained(self) -> bool:
        """True while the latest window has not been trained on."""
        return self._steps() < self._due

    @property
    def row(self) -> int:
        """The number of rows of this epoch that have been trained on."""
        return self._begin if self.untrained else self._end

    @property
    def batches(self) -> int:
        """The number of batches of this epoch that have been trained on."""
        return self._batches_before(self.row)

    @property
    def ended(self) -> bool:
        """True once the epoch's last batch has been trained on."""
        return self.batches >= self._last

    def __iter__(self) -> Iterator[TensorDict]:
        # Lightning leaves the iterator at an epoch's last yield, so the next one begins here.
        if self.ended:
            self.epoch, self._end = self.epoch + 1, 0
        else:
            self._end = self.row
        order: Sequence[int] = range(self.rows)
        if self._seed is not None:
            order = permutation(self.rows, self._seed, self.epoch).tolist()
        while self._batches_before(self._end) < self._last:
            self._next_window(order)
            yield from self.window

    def _next_window(self, order: Sequence[int]) -> None:
        self._begin, self._due, self.random = self._end, self._steps() + 1, random_state()
        count, first = self._accumulate(), self._batches_before(self._begin)
        # As Lightning does it: a step after each multiple of ``count``, and after the last batch.
        batches = min(count - first % count, self._last - first)
        begins = [self._begin + n * self._across for n in range(batches)]
        made = [self.share(order, place) for place in begins]
        self._end = min(begins[-1] + self._across, self.rows)
        total = torch.zeros((), dtype=torch.float64)
        for batch, counts in made:
            total += self._weigh(batch).double() * counts
        factor = world_size() * count / all_sum(total).clamp(min=1e-12)
        self.window = [batch.set(SCALE, factor * counts) for batch, counts in made]

    def _batches_before(self, row: int) -> int:
        # Counted from the epoch's end: all batches but the last are full, on any number of ranks.
        return len(self) - -(-(self.rows - row) // self._across)

    def state_dict(self) -> dict[str, Any]:
        """Return the place as two numbers, the same on all ranks."""
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken."""
        self.epoch, self._end, self._due = state["epoch"], min(state["row"], self.rows), 0
