"""Attention through a sliding window, where a device has no fused kernel for it.

With a window of W tokens a query sees itself and the W - 1 tokens before it. What is seen is cut
into blocks of queries, each with the few keys that any of them sees: so work is in proportion to
S x W, not to S x S. Each block has a band of a mask, of all together S x (W + BLOCK) elements.
"""

import torch
from torch import Tensor

from lightning_rl.models.attention.batches import (
    AttentionBatch,
    AttentionBatches,
    Pieces,
    parts_of,
    restored,
)

BLOCK = 256
"""Most queries of a block: the more they are, the more keys each computes that it does not see."""


def windowed_batches(seen: Pieces, window: int) -> AttentionBatches:
    """Calls of SDPA in which each query sees itself and ``window`` - 1 tokens before itself."""
    blocks = blocks_of(seen, window)
    parts = parts_of(blocks.asking > 0, blocks.asking, blocks.earlier)
    return restored([_banded(blocks, part, window) for part in parts], int(seen.asking.sum()))


def blocks_of(seen: Pieces, window: int) -> Pieces:
    """The same queries in pieces of at most ``BLOCK``, each with the keys in any one's window."""
    count = -(-seen.asking // BLOCK)
    piece = torch.arange(len(count), device="cpu").repeat_interleave(count)
    turn = torch.arange(len(piece), device="cpu") - (count.cumsum(0) - count)[piece]
    asking = (seen.asking[piece] - turn * BLOCK).clamp(max=BLOCK)
    # Places in all that the piece sees, its prefix first: the block sees those from begin to end.
    prefix = seen.prefix_length[piece]
    end = seen.earlier[piece] + turn * BLOCK + asking
    begin = (end - asking - window + 1).clamp(min=0)
    return Pieces(
        seen.start[piece] + (begin - prefix).clamp(min=0),
        end - begin.maximum(prefix),
        seen.prefix_start[piece] + begin.minimum(prefix),
        (prefix - begin).clamp(min=0),
        asking,
        seen.rows,
    )


def _banded(blocks: Pieces, part: Tensor, window: int) -> AttentionBatch:
    batch = blocks.masked(part)
    assert batch.mask is not None
    queries = torch.arange(batch.query.shape[1], device="cpu")[:, None]
    before = torch.arange(batch.key.shape[1] - len(queries), device="cpu")
    earlier = blocks.earlier[part][:, None, None]
    near = torch.cat(
        [
            earlier + queries - before < window,
            (queries - queries.T < window).expand(len(part), -1, -1),
        ],
        2,
    )
    batch.mask &= near[:, None]
    return batch
