"""Trace the fused attention kernel's definition: ``torch.compile`` takes the operator whole.

On CUDA torch's kernel is one; its definition (:func:`plain_varlen`) loops over segments, which a
compiler would trace anew for each micro-batch.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_rl.models.attention.varlen import plain_varlen


@torch.library.custom_op("lightning_rl_tests::varlen", mutates_args={})
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: list[int],
) -> Tensor:
    return _defined((q, k, v), (query_ends, key_ends), scale, window).contiguous()


@_forward.register_fake
def _(q: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("lightning_rl_tests::varlen_backward", mutates_args={})
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float | None,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    def gradients() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
            out = _defined(inputs, (query_ends, key_ends), scale, window)
            return torch.autograd.grad(out, inputs, grad)

    # Within an operator autograd is off for the whole thread.
    with ThreadPoolExecutor(1) as thread:
        one, two, three = thread.submit(gradients).result()
    return one, two, three


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _defined(
    inputs: Sequence[Tensor], ends: Sequence[Tensor], scale: float | None, window: list[int]
) -> Tensor:
    left, right = window
    return plain_varlen(
        *inputs, *ends, 0, 0, scale=scale, window_size=(left, right), enable_gqa=True
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, _, scale, window = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = scale, window


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def traced_varlen(
    *arguments: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool
) -> Tensor:
    """Take the arguments of :func:`plain_varlen`."""
    found: Tensor = _forward(*arguments, scale, list(window_size))
    return found
