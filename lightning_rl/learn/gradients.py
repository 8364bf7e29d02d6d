"""Gradients of all of a policy's parameters, whichever ranks have shards of them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_rl.models.sharding import full_tensor


@torch.no_grad()
def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, ().

    As ``torch.nn.utils.get_total_norm``, also where ranks share them over several meshes.
    """
    norms = [full_tensor(nn.utils.get_total_norm(some)) for some in _by_mesh(gradients)]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm is ``max_norm`` at most; returns what it was, ()."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = norm_of(gradients)
    scale_gradients(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, (), in place."""
    for some in _by_mesh(gradients):
        torch._foreach_mul_(some, factor)


def _by_mesh(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that one operation takes together."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    return list(found.values())
