"""Norm, clipping and scaling of a policy's gradients, also where ranks hold shards of them."""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.run.processes.dist import rank

_log = logging.getLogger(__name__)


@torch.no_grad()
def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, shape ().

    Equal to ``torch.nn.utils.get_total_norm``, but also supports gradients sharded over several
    meshes.
    """
    norms = [full_tensor(nn.utils.get_total_norm(some)) for some in _by_mesh(gradients)]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most ``max_norm``; return the norm before that, ()."""
    with_one = [p for p in parameters if p.grad is not None]
    norm = norm_of([p.grad for p in with_one if p.grad is not None])
    for some in _by_mesh(with_one):
        nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return norm


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, (), in place."""
    for some in _by_mesh(gradients):
        torch._foreach_mul_(some, factor)


def step_norm(optimizer: Optimizer) -> float:
    """Return the norm of all gradients together with which an optimizer is about to step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return float(norm_of([p.grad for p in parameters if p.grad is not None]))


def skip_step(optimizer: Optimizer, prefix: str, warn: bool) -> None:
    """Make an optimizer's next step change nothing, since a gradient is NaN or infinite.

    Args:
        optimizer: the optimizer, whose gradients are removed.
        prefix: first part of the names of metrics of learning, for the warning.
        warn: log a warning on rank 0.
    """
    optimizer.zero_grad(set_to_none=True)  # an optimizer leaves such parameters alone
    if warn and rank() == 0:
        _log.warning(
            "the gradient is NaN or infinite; this optimizer step is skipped, as are all such "
            "steps (%s/nonfinite_skipped counts them); look for extreme logprobs or "
            "advantages, or lower lr",
            prefix,
        )


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device mesh, since one operation takes tensors of a single mesh."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())
