"""Ranks with the same heads that share their queries: each gathers all keys and values.

For more ranks than a model has heads. That keys and values are all-gathered, as in Llama 3's
context parallelism (arXiv 2407.21783 section 3.3.2), takes the place of a ring in which blocks of
them travel while partial results are merged (Liu et al. 2023, arXiv 2310.01889). A rank sends as
much in a forward pass, and half as much in a backward pass. Attention stays one call of the kernel
that there is, exact for prompts that rollouts share and however they are cut; and no rank waits for
the slowest at each of the steps of a ring. What it costs is memory: a rank has a layer's keys and
values of all tokens, for its heads, which with grouped queries are few. Autograd keeps what the
kernel read of them; layers that are recomputed gather them again instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_rl.models.attention.packed import TokenExchange


@dataclass(frozen=True)
class KeyExchange:
    """Sends a layer's keys and values to the ranks of all places, and their gradients back.

    Args:
        group: of the ranks.
        room: tokens of each place, with those that it lacks.
        asking: the first of them, which are this one's queries.
    """

    group: Any
    room: int
    asking: int

    @torch.compiler.disable  # ranks exchange tokens
    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return own queries (a, H, D), and keys and values (g room, Hkv, D) of all places."""
        # In one message.
        found = _Gathered.apply(torch.cat([k, v], 1), self.group)
        return q[: self.asking], *found.split([k.shape[1], v.shape[1]], 1)

    @torch.compiler.disable  # ranks exchange tokens
    def gather_heads(self, output: Tensor) -> Tensor:
        """Pad outputs (a, H, D) to a place's (room, H, D)."""
        return F.pad(output, (0, 0, 0, 0, 0, self.room - self.asking))


@dataclass(frozen=True)
class InTurn:
    """Two exchanges, one after the other."""

    first: TokenExchange
    then: TokenExchange

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Apply the first exchange, then the second."""
        return self.then.gather_tokens(*self.first.gather_tokens(q, k, v))

    def gather_heads(self, output: Tensor) -> Tensor:
        """Undo the second exchange, then the first."""
        return self.first.gather_heads(self.then.gather_heads(output))


class _Gathered(torch.autograd.Function):
    """Gathers rows (r, ...) of g ranks as (g r, ...); each rank gets the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


def gathered(rows: Tensor, group: Any) -> Tensor:
    """Return the rows (r, ...) of all g ranks, concatenated in rank order, (g r, ...)."""
    rows = rows.contiguous()
    result = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(result, rows, group=group)
    return result


def summed(rows: Tensor, group: Any) -> Tensor:
    """Sum g ranks' rows (g r, ...), and return this rank's part, (r, ...).

    It sends as much as a reduce-scatter, which in 16 bits would round at each addition.
    """
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    wide = torch.promote_types(rows.dtype, torch.float32)
    parts = received.unflatten(0, (dist.get_world_size(group), -1))
    return parts.sum(0, dtype=wide).to(rows.dtype)
