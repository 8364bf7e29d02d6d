"""Units: what is sampled as a whole, out of rows of data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import DataError
from lightning_rl.run.seeding import permutation

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """One tree about one row of data.

    ``row`` is the row's number, ``draw`` its place in the iteration, in which it may be drawn
    again; ``sample`` numbers the trees of one draw.
    """

    draw: int
    sample: int
    row: int
    columns: Row

    @property
    def name(self) -> str:
        """Tells it from the others of the iteration."""
        return f"{self.draw}/{self.sample}"


def rows_of(dataset: PromptDataset) -> list[Row]:
    """The rows of a dataset as they are, without a tokenizer.

    Raises:
        DataError: if it holds none.
    """
    rows: list[Row] = [dict(row) for row in dataset.shaped().unchecked()]
    if not rows:
        raise DataError(f"{dataset!r} holds no rows; expected at least one")
    return rows


def all_units(rows: Sequence[Row]) -> list[Unit]:
    """One for each row, in their order."""
    return [Unit(place, 0, place, row) for place, row in enumerate(rows)]


def train_units(
    rows: Sequence[Row], iteration: int, count: int | None, samples: int, seed: int
) -> list[Unit]:
    """Those of an iteration: rows are drawn without end, pass after pass.

    Args:
        rows: that are drawn.
        iteration: counted from 0.
        count: draws in each iteration; None: as many as there are rows.
        samples: trees of each draw.
        seed: of the order, which is new in each pass.
    """
    count = len(rows) if count is None else count
    first = iteration * count
    laps = range(first // len(rows), (first + count - 1) // len(rows) + 1)
    order = [row for lap in laps for row in permutation(len(rows), seed, lap).tolist()]
    begin = first - laps.start * len(rows)
    return [
        Unit(draw, sample, row, rows[row])
        for draw, row in enumerate(order[begin : begin + count])
        for sample in range(samples)
    ]
