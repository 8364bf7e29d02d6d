"""Inputs of an engine's forward pass for rows that see pictures."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.vision.embedding import as_position_ids, picture_inputs
from lightning_rl.vision.families import Family, Features, Prepared
from lightning_rl.vision.pictured_text import PicturedText

KEPT_PLACEHOLDERS = 1 << 16
"""Maximum placeholders of the pictures whose features are cached, least recently used out first."""


class SeenOnce:
    """Runs a tower on each picture separately, once until its weights change.

    So a row's tokens do not depend on which other rows see a picture, or saw it before: the
    rollouts of a group, and the turns of a chat, share its features.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._kept: OrderedDict[Prepared, Features] = OrderedDict()
        self._placeholders = 0

    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        """Return the same as :meth:`Family.features`, from the cache where possible."""
        found = [self._of(lm, one) for one in pictures]
        deeper = zip(*(one.deeper for one in found), strict=True)
        return Features(
            torch.cat([one.first for one in found]), tuple(torch.cat(layer) for layer in deeper)
        )

    def clear(self) -> None:
        """Clear the cache, because weights change."""
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
    seen: Sequence[PicturedText | None],
    input_ids: Tensor,
    position_ids: Tensor,
    **others: Any,
) -> dict[str, Any]:
    """Return the language model's arguments for N x T tokens; ``others`` are passed through.

    ``position_ids`` (N, T) are the tokens' indices in their rows' texts, and ``seen`` (N) describes
    the pictures of each text; None if it has none. Padding before a row's first token has index 0
    and sees the same as that token; nothing attends to it.
    """
    family, index = tower.family, position_ids.cpu()
    rows = zip(seen, index, strict=True)
    with torch.device("cpu"):
        positions = torch.stack(
            [text.positions(at) if text else at.expand(family.axes, -1) for text, at in rows], 1
        )
        picture, part, shown = _shown(seen, index)
    inputs = picture_inputs(family, tower.features, lm, input_ids, picture, part, shown.__getitem__)
    return {
        **others,
        **inputs,
        "position_ids": as_position_ids(positions.to(input_ids.device)),
    }


def _shown(
    seen: Sequence[PicturedText | None], index: Tensor
) -> tuple[Tensor, Tensor, list[Prepared]]:
    """Return the picture and the part of it that each token sees, (N, T), and all pictures once."""
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
