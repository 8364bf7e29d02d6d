"""Faster LoRA layers for vLLM on CPUs: a few matrix products for the adapters of all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class FusedAdapters:
    """Takes over the linear layers of one of vLLM's punica wrappers.

    vLLM's own CPU code copies both factors for every token: at rank 16 a small model generates 4
    times slower than without adapters. Here the factors A of all N adapters, and of all P parts of
    a layer (q, k and v; gate and up), form one matrix (P N rank, in), and those of B one per part
    (N rank, out): a part of the output is ``y + ((x A^T) * mask) B``. The mask (T, N rank), the
    same for all parts, selects for each of T tokens the columns of its own adapter.

    Args:
        wrapper: the punica wrapper that the layers call.
        layers: the layers that call it.
    """

    def __init__(self, wrapper: Any, layers: list[Any]) -> None:
        self._wrapper = wrapper
        self._update = wrapper.update_metadata
        self._matrices = dict(self._fused(layer) for layer in layers)
        self._mask: Tensor | None = None
        wrapper.update_metadata, wrapper.add_lora_linear = self.update, self.add

    def _fused(self, layer: Any) -> tuple[int, tuple[Tensor, list[Tensor]]]:
        """Let vLLM write a layer's factors into fused matrices; return their key and them."""
        first, parts = layer.lora_a_stacked[0], len(layer.lora_a_stacked)
        slots, _, self._rank, width = first.shape
        a = first.new_zeros(parts, slots, 1, self._rank, width)
        b = [old.new_zeros(slots, self._rank, old.shape[2]) for old in layer.lora_b_stacked]
        # As vLLM has them: (slots, 1, rank, in) and (slots, 1, out, rank).
        layer.lora_a_stacked = a.unbind()
        layer.lora_b_stacked = tuple(part.transpose(1, 2)[:, None] for part in b)
        matrices = a.flatten(0, 3), [part.flatten(0, 1) for part in b]
        return id(layer.lora_a_stacked), matrices

    def update(self, *arguments: Any, **options: Any) -> None:
        """Discard the mask, because tokens come from other requests or adapters have moved."""
        self._mask = None
        self._update(*arguments, **options)

    def add(self, y: Tensor, x: Tensor, lora_a_stacked: Any, *_: Any, **options: Any) -> None:
        """Add to a layer's output y (T, out) its adapters' output for its input x (T, in)."""
        a, parts = self._matrices[id(lora_a_stacked)]
        if self._mask is None:
            owners = torch.arange(len(parts[0]) // self._rank).repeat_interleave(self._rank)
            self._mask = (self._wrapper.token_lora_indices[:, None] == owners).to(x.dtype)
        inner = F.linear(x, a).chunk(len(parts), dim=-1)
        outputs = y.split([part.shape[1] for part in parts], dim=-1)
        for output, part, chosen in zip(outputs, parts, inner, strict=True):
            output.addmm_(chosen * self._mask, part)
