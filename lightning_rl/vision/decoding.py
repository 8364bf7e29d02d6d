"""What an engine computes where rows that it writes see pictures."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.vision.embedding import as_position_ids, picture_inputs
from lightning_rl.vision.families import Family, Features, Prepared
from lightning_rl.vision.seen import SeenText

KEPT_PLACEHOLDERS = 1 << 16
"""Most placeholders of pictures whose features are kept: of those seen last."""


class SeenOnce:
    """Runs a tower on each picture by itself, once until its weights change.

    So what a row writes does not depend on who else looks at a picture, or has looked at it before:
    the rollouts of a group, and the turns of a chat, share what was seen.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._kept: OrderedDict[Prepared, Features] = OrderedDict()
        self._placeholders = 0

    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        """As :meth:`Family.features`."""
        found = [self._of(lm, one) for one in pictures]
        deeper = zip(*(one.deeper for one in found), strict=True)
        return Features(
            torch.cat([one.first for one in found]), tuple(torch.cat(layer) for layer in deeper)
        )

    def clear(self) -> None:
        """Forget all, for weights change."""
        self._kept.clear()
        self._placeholders = 0

    def _of(self, lm: PreTrainedModel, picture: Prepared) -> Features:
        if picture not in self._kept:
            self._kept[picture] = self.family.features(lm, [picture])
            self._placeholders += picture.count
        self._kept.move_to_end(picture)
        features = self._kept[picture]
        while self._placeholders > KEPT_PLACEHOLDERS and len(self._kept) > 1:
            self._placeholders -= self._kept.popitem(last=False)[0].count
        return features


def seeing_inputs(
    tower: SeenOnce,
    lm: PreTrainedModel,
    seen: Sequence[SeenText | None],
    input_ids: Tensor,
    position_ids: Tensor,
    **others: Any,
) -> dict[str, Any]:
    """What the language model takes of N x T tokens, for those and their indices; others as given.

    ``position_ids`` (N, T) are the tokens' indices in their rows' texts, and ``seen`` (N) says what
    those see; None of a text without pictures. What lies before a row's first token, as padding,
    has its index 0, and sees what that one does: nothing looks at it.
    """
    family, index = tower.family, position_ids.cpu()
    rows = zip(seen, index, strict=True)
    with torch.device("cpu"):
        positions = torch.stack([_positions(family, text, at) for text, at in rows], 1)
        picture, part, shown = _shown(seen, index)
    inputs = picture_inputs(family, tower.features, lm, input_ids, picture, part, shown.__getitem__)
    return {
        **others,
        **inputs,
        "position_ids": as_position_ids(positions.to(input_ids.device)),
    }


def _positions(family: Family, seen: SeenText | None, index: Tensor) -> Tensor:
    """Positions (axes, T) of the tokens of a row at these indices (T,)."""
    return index.expand(family.axes, -1) if seen is None else seen.positions(index)


def _shown(seen: Sequence[SeenText | None], index: Tensor) -> tuple[Tensor, Tensor, list[Prepared]]:
    """Which picture, and which part of it, each token sees (N, T); all pictures, each once."""
    picture, part = torch.full_like(index, -1), torch.zeros_like(index)
    numbers: dict[Prepared, int] = {}
    for line, (text, at) in enumerate(zip(seen, index, strict=True)):
        if text is None or int(at.min()) >= text.end:
            continue
        own, parts = text.sees(text.end)
        inside = at < text.end
        picture[line, inside], part[line, inside] = own[at[inside]], parts[at[inside]]
        known = [numbers.setdefault(one, len(numbers)) for one in text.pictures]
        sees = picture[line] >= 0
        picture[line, sees] = torch.tensor(known)[picture[line, sees]]
    return picture, part, list(numbers)
