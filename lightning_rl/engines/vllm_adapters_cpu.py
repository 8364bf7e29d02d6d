"""vLLM's LoRA layers on CPUs: two products for the adapters of all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class FusedAdapters:
    """Takes over the linear layers of one of vLLM's punica wrappers.

    vLLM's own way on CPUs copies both factors for every token: at rank 16 a small model writes 4
    times slower with it than without adapters. Here the factors of all N adapters and of all P
    parts of a layer (q, k and v; gate and up) stand in two matrices, A (K, in) and B (K, out) with
    K = P N rank, and a layer's output is ``y + ((x A^T) * mask) B``: the mask (T, K) leaves to each
    of T tokens the columns of its own adapter.

    Args:
        wrapper: what the layers call.
        layers: the layers that do.
    """

    def __init__(self, wrapper: Any, layers: list[Any]) -> None:
        self._wrapper = wrapper
        self._update = wrapper.update_metadata
        self._matrices = dict(self._fused(layer) for layer in layers)
        self._masks: dict[int, Tensor] = {}
        wrapper.update_metadata, wrapper.add_lora_linear = self.update, self.add

    def _fused(self, layer: Any) -> tuple[int, tuple[Tensor, Tensor]]:
        """Let vLLM write a layer's factors into the two matrices; by the key they are found by."""
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        parts, (slots, _, self._rank, width) = len(a), a[0].shape
        widths = [part.shape[2] for part in b]
        all_a = a[0].new_zeros(parts, slots, 1, self._rank, width)
        all_b = b[0].new_zeros(parts, slots, self._rank, sum(widths))
        layer.lora_a_stacked = all_a.unbind()
        layer.lora_b_stacked = tuple(
            # As vLLM has it: (slots, 1, out, rank).
            own.narrow(-1, sum(widths[:part]), widths[part]).transpose(1, 2)[:, None]
            for part, own in enumerate(all_b)
        )
        return id(layer.lora_a_stacked), (all_a.flatten(0, 3), all_b.flatten(0, 2))

    def update(self, *arguments: Any, **options: Any) -> None:
        """Other tokens come, or adapters have changed their places."""
        self._masks.clear()
        self._update(*arguments, **options)

    def add(self, y: Tensor, x: Tensor, lora_a_stacked: Any, *_: Any, **options: Any) -> None:
        """Add to a layer's output y (T, out) what its adapters make of its input x (T, in)."""
        a, b = self._matrices[id(lora_a_stacked)]
        y.addmm_(F.linear(x, a).mul_(self._mask(len(lora_a_stacked), len(a), x)), b)

    def _mask(self, parts: int, columns: int, x: Tensor) -> Tensor:
        if parts not in self._masks:
            owners = torch.arange(columns // parts // self._rank).repeat_interleave(self._rank)
            own = self._wrapper.token_lora_indices[:, None] == owners.repeat(parts)
            self._masks[parts] = own.to(x.dtype)
        return self._masks[parts]
