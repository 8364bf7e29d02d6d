"""Weights that hold NaN or infinity: told as what they are, and neither saved nor pushed on."""

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_rl.dist import any_rank
from lightning_rl.errors import NonFiniteWeightsError
from lightning_rl.models.soundness import is_finite

ADVICE = (
    "an update made them so: lower the learning rate or max_grad_norm, and go on from the last "
    "checkpoint, which is good"
)


def non_finite(module: nn.Module) -> str | None:
    """The first parameter that is not finite, on this rank: of sharded ones, its own part."""
    for name, parameter in module.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not is_finite(part):
            return name
    return None


def require_finite_weights(module: nn.Module, doing: str) -> None:
    """Check all weights, on every rank, in one pass over them.

    Args:
        module: whose parameters.
        doing: what would be done with them, for the message: "saved as ...".

    Raises:
        NonFiniteWeightsError: on all ranks, if any weight of any rank is NaN or infinite.
    """
    found = non_finite(module)
    if any_rank(found is not None):
        raise NonFiniteWeightsError(
            f"the trainer's weights are NaN or infinite ({found or 'on another rank'}), so they "
            f"are not {doing}; {ADVICE}"
        )
