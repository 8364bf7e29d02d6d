"""Models of fake tensors, which have shapes and no values: to compute with them takes no memory."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe

from lightning_rl.models.parallel.expert import require_experts, spread
from lightning_rl.models.parallel.tensor import TensorRanks, local
from lightning_rl.models.policy import Policy

Module = TypeVar("Module", bound=nn.Module)

FAKES = FakeTensorMode(allow_non_fake_inputs=True)


def copy_of(
    module: Module,
    tensor: int = 1,
    expert: int = 1,
    fake: bool = True,
    weights: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
) -> Module:
    """Return a copy of a module with the first of ``tensor`` parts of each policy's matrices.

    Or with the first of ``expert`` parts of its experts, which get the number of tokens of an even
    load. Its results are wrong without the other parts, but its memory is that of one process.

    Args:
        module: it stays as it is.
        tensor: number of parts of the matrices.
        expert: number of parts of the experts.
        fake: make the copy of fake tensors; otherwise it has the module's own, as far as it can.
        weights: the dtype of the copy's floating-point parameters; None: the module's.
        buffers: the same for its buffers.

    Raises:
        ConfigError: if the matrices or experts cannot be split into as many parts.
    """
    kept: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, Policy):
            kept[id(part.tokenizer)] = part.tokenizer
    for p in module.parameters():
        kept[id(p)] = nn.Parameter(_made(local(p.detach()), weights, fake), p.requires_grad)
    for buffer in module.buffers():
        kept[id(buffer)] = _made(buffer, buffers, fake)
    made = copy.deepcopy(module, kept)
    for policy in [part for part in made.modules() if isinstance(part, Policy)]:
        if tensor > 1:
            policy.split(TensorRanks(None, tensor))
        if expert > 1:
            require_experts(policy.lm, expert)
            spread(policy, TensorRanks(None, expert))
    return made


def _made(tensor: torch.Tensor, dtype: torch.dtype | None, fake: bool) -> torch.Tensor:
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not fake:
        return tensor.to(dtype)
    with FAKES:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")


class _Grouped(torch.autograd.Function):
    """The shapes of experts' products (S, O) of states (S, I) and weights (E, I, O), in both
    passes.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weights)
        return states.new_empty(len(states), weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, weights = ctx.saved_tensors
        return torch.empty_like(states), torch.empty_like(weights)


def _grouped(states: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Grouped.apply(states.to(weights.dtype), weights)
    return product


@contextmanager
def changed(part: Any, **attributes: Any) -> Iterator[None]:
    """Within the block, set attributes of an object to other values."""
    before = {name: getattr(part, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(part, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(part, name, value)


def shapes_of_experts() -> Any:
    """Compute experts' products by shape: torch cannot infer them without float32 values."""
    return changed(moe, _grouped_mm=_grouped)
