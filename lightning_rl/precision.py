"""Training with weights in bfloat16: Lightning's ``precision: bf16-true``, as RL needs it."""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_rl.arguments import configurable
from lightning_rl.checks import check_optimizer
from lightning_rl.masters import MasterWeights, is_half, unmoved_share

_log = logging.getLogger(__name__)


@configurable
class BFloat16Precision(HalfPrecision):
    """Weights and activations in bfloat16, everything else as it was.

    ``Trainer(precision="bf16-true")`` becomes this one. Lightning's own also rounds what is not the
    model's: the batch's logprobs and rewards, whatever a step creates, and the frequencies of
    rotary embeddings, which are far off after a few hundred positions.

    Args:
        master_weights: let the optimizer step float32 copies (``MasterWeights``). Without them a
            learning rate below 1/256 of a weight changes nothing, unless the optimizer rounds at
            random.
    """

    precision: Literal["bf16-true"] = "bf16-true"

    def __init__(self, master_weights: bool = True) -> None:
        super().__init__("bf16-true")
        self.master_weights = master_weights

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Round all parameters, and no buffer."""
        buffers = [(part, dict(part._buffers)) for part in module.modules()]
        module.to(torch.bfloat16)
        for part, kept in buffers:
            part._buffers.update(kept)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Weights are read in float32, and checked; :meth:`convert_module` rounds them."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """What a step creates keeps its dtype."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """A batch keeps its dtypes."""
        return data


def use_our_precision(trainer: Trainer) -> None:
    """Put :class:`BFloat16Precision` where Lightning has put its own; before the model is made."""
    if type(trainer.precision_plugin) is HalfPrecision and trainer.precision == "bf16-true":
        trainer.strategy.precision_plugin = BFloat16Precision()


def make_optimizer(module: LightningModule, make: OptimizerCallable, params: Iterable[Any]) -> Any:
    """The optimizer of a module's parameters, or groups of them; with master weights for 16 bits.

    Raises:
        ConfigError: if the optimizer does not fit.
    """
    check_optimizer(make)
    groups = list(params)
    optimizer = make(groups)
    if not any(is_half(p) for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    plugin = module.trainer.precision_plugin
    if getattr(plugin, "master_weights", True):
        return MasterWeights(groups, make)
    _warn_of_lost_steps(optimizer)
    return optimizer


def _warn_of_lost_steps(optimizer: Optimizer) -> None:
    share = unmoved_share(optimizer)
    if share > 0.5:
        _log.warning(
            "a step of the learning rate, %g, rounds to nothing for %.0f %% of the weights, which "
            "are in bfloat16; let BFloat16Precision have master_weights, or use an optimizer that "
            "rounds at random",
            optimizer.param_groups[0]["lr"],
            100 * share,
        )
