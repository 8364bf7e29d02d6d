"""Pictures of a packed batch: which pictures each row has, and which one each token sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from lightning_rl.rollout import Picture, Placed, Row
from lightning_rl.vision.reader import PictureReader

NAME = "pictures"
"""Key of the table beside ``tokens`` and ``rollouts``, and of the rollouts' column of indices."""

_POSITION = "position_"


@dataclass(eq=False)
class PictureTable:
    """The distinct sequences of placed pictures in a batch's rows.

    The first is the empty one, for rows without pictures.
    """

    sequences: list[tuple[Placed, ...]]

    def __deepcopy__(self, memo: object) -> "PictureTable":
        return self  # nothing changes it


def picture_columns(rows: Sequence[Row]) -> tuple[list[int], PictureTable] | None:
    """Return each row's index in the table, and the table; None if no row has a picture."""
    if not any(row.pictures for row in rows):
        return None
    places: dict[tuple[Placed, ...], int] = {(): 0}
    numbers = [places.setdefault(tuple(row.placed), len(places)) for row in rows]
    return numbers, PictureTable(list(places))


def with_sight(batch: TensorDict, reader: PictureReader) -> TensorDict:
    """Add columns to a batch's tokens for what they see; leave a batch without pictures as it is.

    The new columns, (T,) each, are ``picture``, the picture's number in the table or -1, ``part``,
    the number of the placeholder within the picture, and a position for each axis.

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
    """Return the names of the columns that :func:`with_sight` added to a batch's tokens."""
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
    """Return the names of the position columns, one for each axis."""
    return [f"{_POSITION}{axis}" for axis in range(reader.family.axes)]


def pictures_in(table: PictureTable) -> list[Picture]:
    """Return the distinct pictures of a table, in the order of their numbers."""
    shown = (picture for placed in table.sequences for _, picture in placed)
    return list(dict.fromkeys(shown))


def as_column(table: PictureTable) -> NonTensorData:
    """Return the table as an entry of a TensorDict."""
    return NonTensorData(table, batch_size=[])
