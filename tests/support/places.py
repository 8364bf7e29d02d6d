"""Provide places that share a micro-batch's queries, one after another in a single process."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_rl.models.attention.packed import PackLayout, packed_attention
from lightning_rl.models.parallel.keys import KeyExchange
from lightning_rl.models.parallel.sharing import QuerySharing


class AsPlace:
    """Has all tokens in the micro-batch's order, and attends as one of several places does."""

    def __init__(self, order: Tensor, first: int, asking: int) -> None:
        self.keys = order.clamp(min=0)
        self.queries = self.keys[first : first + asking]

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return q[self.queries], k[self.keys], v[self.keys]

    def gather_heads(self, output: Tensor) -> Tensor:
        return output


def placed(layout: PackLayout, place: int, places: int) -> tuple[PackLayout, Tensor]:
    """Return the layout of a place, and which of the micro-batch's tokens are its queries."""
    order, exchange, seen = QuerySharing(place, None, places, 1, None).deal(layout.segments)
    assert isinstance(exchange, KeyExchange)
    device, room = layout.tokens.device, len(order) // places
    own = order[place * room :][:room]
    exchange = AsPlace(order.to(device), place * room, exchange.asking)
    part = replace(layout, seen=seen, exchange=exchange, fused=None)
    if layout.fused is not None:
        part.fuse(layout.fused.dtype, layout.fused.heads)
    return part, own[own >= 0].to(device)


def attended_in_places(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, places: int) -> Tensor:
    """Return outputs (1, S, H, D) of q (1, H, S, D) on k and v (1, Hkv, S, D), put together."""
    parts = [placed(layout, place, places) for place in range(places)]
    outputs = [
        packed_attention(nn.Identity(), q, k, v, None, layout=part)[0][0, : len(own)]
        for part, own in parts
    ]
    back = torch.cat([own for _, own in parts]).argsort()
    return torch.cat(outputs)[back][None]
