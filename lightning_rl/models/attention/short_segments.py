"""Attention of short segments on a CPU, by two batched products with explicit scores.

A fused kernel computes scores twice, to store none, and has an overhead per head and segment, which
dominates if segments have only tens of tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_rl.models.attention.batches import AttentionBatch

MOST_SCORES = 3000
"""Maximum scores of a segment and key head, over the query heads that share it; beyond, SDPA is as
fast."""
MOST_KEYS = 64
"""Maximum keys of a segment. Memory kept for backward grows with them, for each query head."""


def is_short(batch: AttentionBatch, query: Tensor, repeats: int) -> bool:
    """Tell whether this is faster than SDPA; ``repeats`` query heads share a key head.

    It is not used in 16 bits, which would round scores that a fused kernel holds in float32.
    """
    queries, keys = batch.query.shape[1], batch.key.shape[1]
    wide = query.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return (
        query.device.type == "cpu"
        and wide
        and keys <= MOST_KEYS
        and repeats * queries * keys <= MOST_SCORES
    )


def attend_short(
    batch: AttentionBatch, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> Tensor:
    """Compute attention (N Lq, Hq, D) of a batch's queries in q (S, Hq, D) on k and v (S, H, D).

    Values may have a different width from keys.
    """
    heads = k.shape[1]
    made_for = q.shape[1] // heads, heads, q.dtype
    if made_for not in batch.prepared:
        batch.prepared[made_for] = _Rows.of(batch, *made_for)
    rows: _Rows = batch.prepared[made_for]
    count, _, queries = rows.query.shape
    query, key, value = (
        F.embedding(index, x.reshape(len(x) * heads, -1)).view(count * heads, -1, x.shape[-1])
        for index, x in ((rows.query, q), (rows.key, k), (rows.key, v))
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.baddbmm(rows.bias, query, key.transpose(1, 2), alpha=scale)
    out = scores.softmax(-1) @ value
    return out.view(count, heads, queries, -1).transpose(1, 2).reshape(-1, q.shape[1], v.shape[-1])


@dataclass(slots=True)
class _Rows:
    """Where N segments of Lq queries and Lk keys find their rows, for G query heads on each of H.

    ``query`` (N, H, Lq) indexes the S x H rows of G queries that share a key, ``key`` (N, H, Lk)
    the S x H rows of keys: gathered rows have the layout of the products, and are not copied again.
    ``bias`` (N H, Lq G, Lk) is 0 where a query may look, -inf elsewhere.
    """

    query: Tensor
    key: Tensor
    bias: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, repeats: int, heads: int, dtype: torch.dtype) -> "_Rows":
        head = torch.arange(heads, device="cpu")[:, None]
        query, key = (index[:, None] * heads + head for index in (batch.query, batch.key))
        count, queries, keys = len(query), query.shape[2], key.shape[2]
        seen = batch.mask
        if seen is None:
            seen = torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril()
        bias = torch.zeros(seen.shape, dtype=dtype, device="cpu").masked_fill(~seen, -torch.inf)
        bias = bias.unsqueeze(-2).expand(count, heads, queries, repeats, keys)
        return cls(query, key, bias.reshape(count * heads, -1, keys))
