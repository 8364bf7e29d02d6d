"""PicturedText: the places of pictures in a text, and the positions of its tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl.errors import PictureError
from lightning_rl.rollout import Placed
from lightning_rl.vision.families import Prepared


class PicturedText:
    """The visible tokens and the position of each token of a text with pictures.

    Trainer and engine both use it, so they give a token the same position.

    Args:
        token_ids: the text's tokens; those after its last picture may be left out.
        placed: its pictures in order.
        prepared: the same pictures, as the model reads them.
        placeholder: the token that stands for a part of a picture.
        axes: number of axes of a position.

    Raises:
        PictureError: if the tokens in a picture's place are not its placeholders.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        placed: Sequence[Placed],
        prepared: Sequence[Prepared],
        placeholder: int,
        axes: int,
    ) -> None:
        self.pictures = list(prepared)
        self.starts = [start for start, _ in placed]
        parts: list[Tensor] = []
        end = position = 0
        for start, one in zip(self.starts, self.pictures, strict=True):
            _require_placeholders(token_ids, start, end, one.count, placeholder)
            parts.append(torch.arange(position, position + start - end).expand(axes, -1))
            position += start - end
            parts.append(one.positions + position)
            position, end = position + one.advance, start + one.count
        self._positions = torch.cat(parts, 1) if parts else torch.empty(axes, 0, dtype=torch.long)
        self.delta = position - end
        """Position minus index of each token after the last picture."""

    @property
    def end(self) -> int:
        """The index of the first token after the last picture."""
        return self._positions.shape[1]

    def positions(self, index: Tensor) -> Tensor:
        """Return positions (axes, n) of tokens at ``index`` (n,), which may not exist yet."""
        behind = (index + self.delta).expand(len(self._positions), -1)
        if not self.end:
            return behind
        return torch.where(
            index < self.end, self._positions[:, index.clamp(max=self.end - 1)], behind
        )

    def sees(self, length: int) -> tuple[Tensor, Tensor]:
        """Return what the first ``length`` tokens see: the picture and its placeholder, (length,).

        A picture is an index into ``pictures``, or -1; a placeholder is counted within the picture.
        """
        picture = torch.full((length,), -1)
        part = torch.zeros(length, dtype=torch.long)
        for number, (start, one) in enumerate(zip(self.starts, self.pictures, strict=True)):
            stop = start + one.count
            picture[start:stop] = number
            part[start:stop] = torch.arange(one.count)[: max(0, length - start)]
        return picture, part


def _require_placeholders(
    token_ids: Sequence[int], start: int, end: int, count: int, placeholder: int
) -> None:
    found = token_ids[start : start + count]
    if start < end or len(found) < count or any(token != placeholder for token in found):
        right = sum(token == placeholder for token in found)
        raise PictureError(
            f"a picture at token {start} needs {count} placeholders (token {placeholder}), but "
            f"only {right} of the tokens there are; encode the text and its pictures with the "
            "processor of the model that reads them"
        )
