"""Vision: which parts of an image-text model are trained, and how fast."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.vision.families import Family


@configurable
@dataclass(frozen=True)
class Vision:
    """Which parts of an image-text model are trained besides its language model.

    Args:
        train_tower: train the vision tower, without the projector.
        train_projector: train the modules that map the tower's states to the language model's
            (Qwen's mergers).
        tower_lr: learning rate of both; None: the language model's.

    Raises:
        ConfigError: for a negative learning rate, or one without anything to train.
    """

    train_tower: bool = False
    train_projector: bool = False
    tower_lr: float | None = None

    def __post_init__(self) -> None:
        if self.tower_lr is None:
            return
        if not self.tower_lr >= 0:
            raise ConfigError(f"vision.tower_lr={self.tower_lr} must be >= 0")
        if not (self.train_tower or self.train_projector):
            raise ConfigError(
                f"vision.tower_lr={self.tower_lr} has no effect: set vision.train_tower or "
                "vision.train_projector"
            )

    def freeze(self, family: type[Family], lm: PreTrainedModel) -> None:
        """Freeze what is not trained, in place."""
        projectors = family.projector(lm)
        family.tower(lm).requires_grad_(self.train_tower)
        for projector in projectors:
            projector.requires_grad_(self.train_projector)
        for module in family.unused(lm):
            module.requires_grad_(False)

    def adapted(self, family: type[Family], lm: PreTrainedModel) -> list[str]:
        """Return the full names of all linear layers in trained parts, for a LoRA on all layers."""
        names = {id(module): name for name, module in lm.named_modules()}
        parts: list[nn.Module] = [family.language_model(lm)]
        if self.train_projector:
            parts += family.projector(lm)
        found = dict.fromkeys(names[id(m)] for part in parts for m in _linear(part))
        if self.train_tower:
            projected = {id(m) for part in family.projector(lm) for m in part.modules()}
            own = [m for m in _linear(family.tower(lm)) if id(m) not in projected]
            found |= dict.fromkeys(names[id(module)] for module in own)
        return list(found)


def seeing_parameters(family: type[Family], lm: PreTrainedModel) -> set[int]:
    """Return the ``id`` of each parameter of tower and projector."""
    parts = [family.tower(lm), *family.projector(lm)]
    return {id(parameter) for part in parts for parameter in part.parameters()}


def in_tower(family: type[Family], lm: PreTrainedModel) -> set[str]:
    """Return the full names of the modules of tower and projector."""
    parts = [family.tower(lm), *family.projector(lm)]
    own = {id(module) for part in parts for module in part.modules()}
    return {name for name, module in lm.named_modules() if id(module) in own}


def _linear(part: nn.Module) -> Iterator[nn.Module]:
    return (module for module in part.modules() if isinstance(module, nn.Linear))
