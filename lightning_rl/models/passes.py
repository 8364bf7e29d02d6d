"""Forward passes of a model's body over a micro-batch: packed, or line by line if inexact."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.data.splitting import PADDED, SHARED, Filling
from lightning_rl.models.attention.packed import ATTENTION, PackLayout
from lightning_rl.models.attention.padded_rows import ROWS
from lightning_rl.models.attention.unpacked import Lines
from lightning_rl.vision.reader import attention


class BodyPass(ABC):
    """A forward pass of a model's body over a micro-batch."""

    packed: ClassVar[bool]
    filling: ClassVar[Filling]
    """Counts the tokens that this pass computes for a micro-batch."""

    @abstractmethod
    def prepare(self, lm: PreTrainedModel) -> None:
        """Set the attention of the model's layers as this pass needs it."""

    @abstractmethod
    def lines(self, layout: PackLayout) -> Lines | None:
        """Return the lines in which layers compute a layout's tokens; None: its own row."""

    @abstractmethod
    def states(self, lm: PreTrainedModel, layout: PackLayout) -> Tensor:
        """Return the body's last hidden states (S, D), in the layout's order."""


@dataclass(frozen=True)
class PackedPass(BodyPass):
    """All tokens in one row, shared prompts once (:mod:`lightning_rl.models.attention.packed`)."""

    packed = True
    filling = SHARED

    def prepare(self, lm: PreTrainedModel) -> None:
        lm.set_attn_implementation(attention(lm.config, ATTENTION))

    def lines(self, layout: PackLayout) -> None:
        return None

    def states(self, lm: PreTrainedModel, layout: PackLayout) -> Tensor:
        layout.prepare(lm)
        states: Tensor = lm.base_model(
            input_ids=layout.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        return states


@dataclass(frozen=True)
class UnpackedPass(BodyPass):
    """Each rollout in its own line after its prompt, by the model's own forward.

    The model needs no padding mask, because padding follows all tokens that are read.

    Args:
        attention: transformers' name of the attention; None: the only one of the model.
    """

    attention: str | None

    packed = False
    filling = PADDED

    def prepare(self, lm: PreTrainedModel) -> None:
        if self.attention is not None:
            lm.set_attn_implementation(attention(lm.config, self.attention))

    def lines(self, layout: PackLayout) -> Lines:
        return layout.lines

    def states(self, lm: PreTrainedModel, layout: PackLayout) -> Tensor:
        lines = layout.lines
        states: Tensor = lm.base_model(
            input_ids=layout.input_ids[lines.source], use_cache=False
        ).last_hidden_state
        return states.flatten(0, 1)[lines.place]


PACKED = PackedPass()
WITHOUT_CHOICE = UnpackedPass(None)
OF_ANY_ATTENTION: tuple[BodyPass, ...] = (PACKED, UnpackedPass(ROWS), UnpackedPass("eager"))
"""Passes of models that use transformers' attention interface; the first exact one is used."""
