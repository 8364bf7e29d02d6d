"""Pictures of a packed batch: which row has which, and what each of its tokens sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from lightning_rl.rollout import Picture, Placed, Row
from lightning_rl.vision.reader import PictureReader

NAME = "pictures"
"""Of the table beside ``tokens`` and ``rollouts``, and of the rows' column of places in it."""

_POSITION = "position_"


@dataclass(eq=False)
class PictureTable:
    """All that rows of a batch see: each distinct sequence of placed pictures once.

    The first is that of rows without any.
    """

    sequences: list[tuple[Placed, ...]] = field(default_factory=lambda: [()])

    def __deepcopy__(self, memo: object) -> "PictureTable":
        return self  # nothing changes it


def picture_columns(rows: Sequence[Row]) -> tuple[list[int], PictureTable] | None:
    """Of each row its place in the table; None if no row has a picture."""
    if not any(row.pictures for row in rows):
        return None
    table = PictureTable()
    places: dict[tuple[Placed, ...], int] = {(): 0}
    numbers = []
    for row in rows:
        key = tuple(row.placed)
        if key not in places:
            places[key] = len(places)
            table.sequences.append(key)
        numbers.append(places[key])
    return numbers, table


def with_sight(batch: TensorDict, reader: PictureReader) -> TensorDict:
    """Let a batch's tokens know what they see and their positions; one without pictures stays.

    Their new columns, (T,) each, are ``picture``, the number of the picture in the table, -1
    without, and ``part``, the number of the picture's placeholder; and positions, one an axis.

    Raises:
        PictureError: if a row's pictures and placeholders do not agree.
    """
    if NAME not in batch or "picture" in batch["tokens"]:
        return batch
    tokens = batch["tokens"]
    with torch.device("cpu"):  # also where another is the default
        added = _columns(batch, reader)
    device = tokens["input_ids"].device
    tokens.update({name: column.to(device) for name, column in added.items()})
    return batch


def sight_in(tokens: TensorDict) -> list[str]:
    """The columns of a batch's tokens that :func:`with_sight` has added."""
    if "picture" not in tokens:
        return []
    return ["picture", "part", *(name for name, _ in tokens.items() if name.startswith(_POSITION))]


def _columns(batch: TensorDict, reader: PictureReader) -> dict[str, Tensor]:
    ids, table = batch["tokens", "input_ids"].cpu(), batch[NAME]
    lengths = batch["rollouts", "length"].tolist()
    number_of = {picture: number for number, picture in enumerate(pictures_in(table))}
    picture, part, positions = [], [], []
    rows = zip(ids.split(lengths), lengths, batch["rollouts", NAME].tolist(), strict=True)
    for row_ids, length, place in rows:
        placed = table.sequences[place]
        seen = reader.seen(row_ids.tolist(), placed)
        own, which = seen.sees(length)
        numbers = torch.tensor([number_of[one] for _, one in placed] or [-1])
        picture.append(torch.where(own < 0, -1, numbers[own]))
        part.append(which)
        positions.append(seen.positions(torch.arange(length)))
    named = zip(position_names(reader), torch.cat(positions, 1), strict=True)
    return {"picture": torch.cat(picture), "part": torch.cat(part), **dict(named)}


def position_names(reader: PictureReader) -> list[str]:
    """Names of the columns of positions, one for each axis."""
    return [f"{_POSITION}{axis}" for axis in range(reader.family.axes)]


def pictures_in(table: PictureTable) -> list[Picture]:
    """The distinct pictures of a table, in the order of their numbers."""
    shown = (picture for placed in table.sequences for _, picture in placed)
    return list(dict.fromkeys(shown))


def as_column(table: PictureTable) -> NonTensorData:
    """The table as a part of a TensorDict."""
    return NonTensorData(table, batch_size=[])
