"""Units: the rows of data of an iteration, each sampled as a whole."""

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
        """The unit's name, unique within the iteration."""
        return f"{self.draw}/{self.sample}"


def rows_of(dataset: PromptDataset) -> list[Row]:
    """Return the rows of a dataset as they are, without a tokenizer.

    Raises:
        DataError: if there are none.
    """
    rows: list[Row] = [dict(row) for row in dataset.shaped().unchecked()]
    if not rows:
        raise DataError(f"{dataset!r} holds no rows; expected at least one")
    return rows


def all_units(rows: Sequence[Row]) -> list[Unit]:
    """Return one unit for each row, in order."""
    return [Unit(index, 0, index, row) for index, row in enumerate(rows)]


def train_units(
    rows: Sequence[Row], iteration: int, count: int | None, samples: int, seed: int
) -> list[Unit]:
    """Return the units of an iteration; rows are drawn pass after pass, without end.

    Args:
        rows: the rows to draw from.
        iteration: counted from 0.
        count: draws per iteration; None: as many as there are rows.
        samples: trees per draw.
        seed: determines the order, which is new in each pass.
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
