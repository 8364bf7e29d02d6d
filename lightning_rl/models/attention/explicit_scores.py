"""Attention with explicit scores, to apply caps or sinks, which fused kernels do not support."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class OpenScores(NamedTuple):
    """A layer's change of its scores s before the softmax.

    With a ``cap`` they are ``cap tanh(s / cap)`` (Gemma Team 2024, arXiv 2408.00118, section 2).
    ``sinks`` (H,) are scores of a key without a value, one for each head, that every query sees
    (OpenAI 2025, arXiv 2508.10925, section 2.2).
    """

    cap: float | None
    sinks: Tensor | None

    @classmethod
    def of(cls, cap: float | None, sinks: Tensor | None) -> "OpenScores | None":
        """Return the change of scores; None if there is neither a cap nor sinks."""
        return None if cap is None and sinks is None else cls(cap, sinks)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute attention of q (N, H, Lq, D) on k and v (N, Hkv, Lk, D): (N, H, Lq, D).

        ``mask`` is as for SDPA; None: causal, with the last query seeing all keys.
        """
        heads, queries, keys = key.shape[1], query.shape[2], key.shape[2]
        # Query heads that share keys become queries of one head, so keys need no copies.
        together = query.unflatten(1, (heads, -1)).flatten(2, 3)
        scores = together @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        scores = scores.unflatten(2, (-1, queries))  # (N, Hkv, H / Hkv, Lq, Lk)
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if mask is None and queries > 1:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(keys - queries)[None, None]
        if mask is not None and mask.dtype == torch.bool:
            # Not -inf: what only pads a batch may see nothing at all.
            scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores = scores + mask[:, :, None]
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).view(heads, -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide)[..., :keys].to(value.dtype)
        weights = F.dropout(weights, dropout) if dropout else weights
        out = weights.flatten(2, 3) @ value
        return out.unflatten(2, (-1, queries)).flatten(1, 2)
