"""Pictures as rewards get them: images that are decoded on access."""

from collections.abc import Iterable, Sequence
from typing import overload

from PIL.Image import Image

from lightning_rl.rollout import Picture, Rollout
from lightning_rl.vision.loading import decode


class DecodedPictures(Sequence[Image]):
    """Pictures as PIL images in RGB, each decoded anew at every access.

    So drawing on an image changes nothing that others see.

    Args:
        pictures: the encoded pictures.
    """

    def __init__(self, pictures: Iterable[Picture]) -> None:
        self.pictures = tuple(pictures)

    def __len__(self) -> int:
        return len(self.pictures)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> "DecodedPictures": ...
    def __getitem__(self, index: int | slice) -> "Image | DecodedPictures":
        if isinstance(index, slice):
            return DecodedPictures(self.pictures[index])
        return decode(self.pictures[index])


def seen_in(rollout: Rollout) -> DecodedPictures:
    """Return a prompt's pictures in order, then those that the model saw later, each once."""
    first = rollout.prompt.pictures
    shown = (picture for row in rollout.rows for picture in row.pictures)
    return DecodedPictures([*first, *dict.fromkeys(p for p in shown if p not in first)])
