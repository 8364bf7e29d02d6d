"""All-to-all between ranks, with a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll(torch.autograd.Function):
    """Sends rows (N, ...) to the ranks of a group in order, and receives theirs; with gradients.

    ``counts``: the number of rows to send to and receive from each rank; None: equal parts. All
    ranks of the group call it together, even those without rows.
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
    """Exchange rows like :class:`AllToAll`, without a gradient."""
    sent, received = (None, None) if counts is None else map(list, counts)
    length = len(rows) if received is None else sum(received)
    result = rows.new_empty(length, *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
