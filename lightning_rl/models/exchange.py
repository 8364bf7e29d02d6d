"""All-to-all between ranks, with a gradient: each gives every other one a part of what it has."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll(torch.autograd.Function):
    """Rows (N, ...) go to the ranks of a group, in order, and theirs come; gradients go back.

    ``counts``: how many rows go to each rank, and how many come from each; None: equal parts. The
    ranks of the group call it together, also those that have no rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, counts: tuple[Sequence[int], Sequence[int]] | None
    ) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return exchanged(rows, group, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = None if ctx.counts is None else ctx.counts[::-1]
        return exchanged(grad, ctx.group, back), None, None


def exchanged(
    rows: Tensor, group: Any, counts: tuple[Sequence[int], Sequence[int]] | None = None
) -> Tensor:
    """As :class:`AllToAll`, without a gradient."""
    sent, received = (None, None) if counts is None else map(list, counts)
    length = len(rows) if received is None else sum(received)
    result = rows.new_empty(length, *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
