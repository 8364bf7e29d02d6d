"""Families of image-text models: what a picture is to each, and how it gets into the model.

Everything that differs between architectures is here and in the two files beside; the rest of the
library asks a :class:`Family`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture as a model reads it.

    ``pixels`` are what its processor makes of the picture, float32; ``grid`` the numbers of patches
    that it is cut into (frames, height, width). The model's text has ``count`` placeholders for it,
    whose positions are ``positions`` (axes, count), counted from the first; the token after them is
    ``advance`` positions behind the first.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    positions: Tensor
    advance: int

    @property
    def count(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True, eq=False)
class Features:
    """What a tower makes of pictures with n placeholders in all.

    ``first`` (n, D) take the place of the placeholders' embeddings; ``deeper``, each (n, D), are
    added to what the first layers of the language model compute there.
    """

    first: Tensor
    deeper: tuple[Tensor, ...] = ()


class Family(ABC):
    """One architecture's way to read pictures; it holds no weights.

    Args:
        config: the model's.
        processor: its image processor, of the kind that needs no torchvision.
    """

    architecture: ClassVar[str]
    """Name of the model's class in transformers."""
    axes: ClassVar[int] = 1
    """Numbers that a token's position has."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        self.config = config
        self.processor = processor

    @classmethod
    @abstractmethod
    def reads(cls, config: PretrainedConfig) -> bool:
        """Whether a model of this configuration is of this family."""

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of a picture."""
        return int(self.config.image_token_id)

    def preparation(self) -> tuple[Any, ...]:
        """All that decides what a picture becomes: equal for models that read pictures alike."""
        vision = self.config.vision_config
        sizes = [getattr(vision, name, None) for name in ("patch_size", "spatial_merge_size")]
        return self.placeholder, *sizes, self.processor.to_dict()

    @abstractmethod
    def prepare(self, image: Image) -> Prepared:
        """A picture as the model reads it."""

    @abstractmethod
    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        """Run the tower, once, on several pictures; their placeholders one after another."""

    @classmethod
    @abstractmethod
    def tower(cls, lm: PreTrainedModel) -> nn.Module:
        """The part that sees, with the projector if that is in it."""

    @classmethod
    @abstractmethod
    def projector(cls, lm: PreTrainedModel) -> list[nn.Module]:
        """What maps the tower's states to the language model's."""

    @classmethod
    def unused(cls, lm: PreTrainedModel) -> list[nn.Module]:
        """What of the tower nothing comes of; here, none."""
        return []

    @abstractmethod
    def own_inputs(self, pictures: Sequence[Prepared], token_ids: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's own forward beside ``input_ids``, which are ``token_ids``."""

    @classmethod
    def language_model(cls, lm: PreTrainedModel) -> Any:
        """The part that reads text: of the body, without the output head."""
        return lm.base_model.language_model

    def inputs(
        self, embedded: Tensor, at: tuple[Tensor, Tensor], index: Tensor, features: Features
    ) -> dict[str, Any]:
        """Arguments of the language model for tokens whose embeddings are ``embedded`` (N, T, D).

        ``at``, rows and columns (m,) in their order, are placeholders, and ``index`` (m,) says
        which of the features each sees.
        """
        seen = rows_of(features.first, index).to(embedded.dtype)
        return {"inputs_embeds": embedded.index_put(at, seen)}


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (n, D) at ``index`` (m,); its backward adds up those that are asked twice."""
    return torch.nn.functional.embedding(index, table)


def tensor_of(processed: Any, name: str) -> Tensor:
    """What a processor made, of one picture."""
    made: Tensor = processed[name]
    return made.float()
