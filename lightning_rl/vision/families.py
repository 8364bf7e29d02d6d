"""Families of image-text models: how each prepares a picture, and feeds it to the model.

Everything that differs between architectures is here, in ``qwen`` and in ``llava``; the rest of the
library uses a :class:`Family`.
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

    ``pixels`` is the processor's output, float32; ``grid`` the number of patches (frames, height,
    width). The model's text has ``count`` placeholders for the picture, at ``positions`` (axes,
    count) relative to the first; the token after them is ``advance`` positions after the first.
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
    """A tower's output for pictures with n placeholders in total.

    ``first`` (n, D) replaces the placeholders' embeddings; each of ``deeper``, (n, D), is added to
    the output of one of the language model's first layers.
    """

    first: Tensor
    deeper: tuple[Tensor, ...] = ()


class Family(ABC):
    """How one architecture reads pictures; holds no weights.

    Args:
        config: the model's configuration.
        processor: its image processor, in the variant that needs no torchvision.
    """

    architecture: ClassVar[str]
    """Name of the model's class in transformers."""
    axes: ClassVar[int] = 1
    """Number of axes of a token's position."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        self.config = config
        self.processor = processor

    @classmethod
    @abstractmethod
    def reads(cls, config: PretrainedConfig) -> bool:
        """Tell whether a model with this configuration belongs to this family."""

    @property
    def placeholder(self) -> int:
        """The id of the token that stands for a part of a picture."""
        return int(self.config.image_token_id)

    def preparation(self) -> tuple[Any, ...]:
        """Return all settings of the preparation; equal for models that read pictures alike."""
        vision = self.config.vision_config
        sizes = [getattr(vision, name, None) for name in ("patch_size", "spatial_merge_size")]
        return self.placeholder, *sizes, self.processor.to_dict()

    @abstractmethod
    def prepare(self, image: Image) -> Prepared:
        """Return a picture as the model reads it."""

    @abstractmethod
    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        """Run the tower once on several pictures; the features follow in the pictures' order."""

    @classmethod
    @abstractmethod
    def tower(cls, lm: PreTrainedModel) -> nn.Module:
        """Return the vision tower, including the projector if that is part of it."""

    @classmethod
    @abstractmethod
    def projector(cls, lm: PreTrainedModel) -> list[nn.Module]:
        """Return the modules that map the tower's states to the language model's."""

    @classmethod
    def unused(cls, lm: PreTrainedModel) -> list[nn.Module]:
        """Return modules of the tower whose output is never used; none by default."""
        return []

    @abstractmethod
    def own_inputs(self, pictures: Sequence[Prepared], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model's own forward besides ``input_ids`` (``token_ids``)."""

    @classmethod
    def language_model(cls, lm: PreTrainedModel) -> Any:
        """Return the body of the language model, without the output head."""
        return lm.base_model.language_model

    def inputs(
        self, embedded: Tensor, at: tuple[Tensor, Tensor], index: Tensor, features: Features
    ) -> dict[str, Any]:
        """Return the language model's arguments for tokens with ``embedded`` (N, T, D).

        ``at`` holds rows and columns (m,) of the placeholders in order, and ``index`` (m,) the row
        of ``features`` for each.
        """
        seen = rows_of(features.first, index).to(embedded.dtype)
        return {"inputs_embeds": embedded.index_put(at, seen)}


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table (n, D) at ``index`` (m,); backward sums gradients of repeated rows."""
    return torch.nn.functional.embedding(index, table)


def tensor_of(processed: Any, name: str) -> Tensor:
    """Return a processor's output for one picture, as float32."""
    made: Tensor = processed[name]
    return made.float()
