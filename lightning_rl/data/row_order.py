"""The order in which rows are drawn, which a checkpoint holds as two numbers."""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_rl.run.seeding import permutation


class RowOrder:
    """Each row once per epoch, in an order that can be made again from the epoch's number."""

    def __init__(self) -> None:
        self.epoch = 0
        self.cursor = 0
        self._rows: Sequence[int] | np.ndarray = []

    def begin(self, rows: int, seed: int | None, *block: int, cursor: int = 0) -> None:
        """Order this epoch's rows at random, as seed, epoch and ``block`` fix; None: as they are.

        ``block`` is the number of a block of rows, where the rows are not all known at once.
        """
        self.cursor = cursor
        self._rows = range(rows)
        if seed is not None:
            self._rows = permutation(rows, seed, self.epoch, *block).numpy()

    @property
    def ended(self) -> bool:
        """True if all rows were drawn; then another epoch, or block, has to begin."""
        return self.cursor == len(self._rows)

    def next(self) -> int:
        """Return the next row's index."""
        self.cursor += 1
        return int(self._rows[self.cursor - 1])

    def upcoming(self, count: int) -> Iterable[int]:
        """Return at most ``count`` of the rows that follow, as far as they are known."""
        return map(int, self._rows[self.cursor : self.cursor + count])
