"""Ranks that have the same heads and share their queries: each gathers the keys and values of all.

For more ranks than a model has heads. That keys and values are all-gathered, as in Llama 3's
context parallelism (arXiv 2407.21783 section 3.3.2), takes the place of a ring in which blocks of
them travel while partial results are merged (Liu et al. 2023, arXiv 2310.01889). A rank sends as
much in a forward pass, and half as much in a backward pass. Attention stays one call of the kernel
that there is, exact for prompts that rollouts share and however they are cut; and no rank waits for
the slowest at each of the steps of a ring. What it costs is memory: a rank has a layer's keys and
values of all tokens, for its heads, which with grouped queries are few. Autograd keeps what the
kernel read of them; layers that are recomputed gather them again instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_rl.models.attention import Attending, TokenExchange
from lightning_rl.models.attention_batches import Segments
from lightning_rl.models.query_shares import PlacedQueries, deal, tokens_of


class Dealt(NamedTuple):
    """How n ranks have a pack's row of S tokens, each a share of s, and what one of them sees.

    ``order`` (n s,), on the CPU: the tokens of one rank after another, as their places in the row;
    -1: none.
    """

    order: Tensor
    segments: Attending
    exchange: TokenExchange | None


class Sharing(Protocol):
    """A way in which ranks share a pack's tokens."""

    def deal(self, segments: Segments) -> Dealt:
        """The tokens of a pack's segments; all ranks call it with the same."""


@dataclass(frozen=True)
class HeadSharing:
    """Each of n ranks has the tokens that follow those of the one before it.

    Attention is computed for all of them, so that it does not matter which they are.

    Args:
        ranks: n.
        exchange: of their heads, for so many tokens; None: the only rank has all of them.
    """

    ranks: int
    exchange: Callable[[int], TokenExchange] | None

    def deal(self, segments: Segments) -> Dealt:
        """As :class:`Sharing` says."""
        count = int(segments.length.sum())
        order = torch.arange(-(-count // self.ranks) * self.ranks, device="cpu")
        exchange = None if self.exchange is None else self.exchange(count)
        return Dealt(order.masked_fill(order >= count, -1), segments, exchange)


@dataclass(frozen=True)
class QuerySharing:
    """Ranks are in g places of u: those of a place share heads, and places the queries.

    Args:
        place: this rank's.
        others: the ranks of all places that have the same heads as this one, in their order.
        places: g.
        ranks: of a place, u.
        exchange: of a place's heads, for so many tokens; None: its only rank has all of them.
    """

    place: int
    others: Any
    places: int
    ranks: int
    exchange: Callable[[int], TokenExchange] | None

    def deal(self, segments: Segments) -> Dealt:
        """As :class:`Sharing` says."""
        count = int(segments.length.sum())
        room = -(-count // (self.ranks * self.places)) * self.ranks
        _, before = segments.before
        dealt = deal(segments.length.tolist(), before.tolist(), self.places, room)
        tokens = [tokens_of(segments, pieces) for pieces in dealt]
        order = torch.cat([F.pad(own, (0, room - len(own)), value=-1) for own in tokens])
        seen = PlacedQueries.of(segments, dealt[self.place], rows_of(order, count))
        exchange: TokenExchange = KeyExchange(self.others, room, int(seen.asking.sum()))
        if self.exchange is not None:
            exchange = InTurn(self.exchange(room), exchange)
        return Dealt(order, seen, exchange)


def rows_of(order: Tensor, count: int) -> Tensor:
    """Where in ``order`` each of so many tokens is, (S,)."""
    rows = torch.empty(count, dtype=torch.long, device="cpu")
    rows[order[order >= 0]] = (order >= 0).nonzero().squeeze(1)
    return rows


@dataclass(frozen=True)
class KeyExchange:
    """The way of a layer's keys and values to the ranks of all places, and of their gradients back.

    Args:
        group: of the ranks.
        room: tokens of each place, with those that it lacks.
        asking: the first of them, which are this one's queries.
    """

    group: Any
    room: int
    asking: int

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Own queries (a, H, D), and keys and values (g room, Hkv, D) of all places."""
        # In one message.
        found = _Gathered.apply(torch.cat([k, v], 1), self.group)
        return q[: self.asking], *found.split([k.shape[1], v.shape[1]], 1)

    def gather_heads(self, output: Tensor) -> Tensor:
        """Outputs (a, H, D) to (room, H, D), for that is what a place has."""
        return F.pad(output, (0, 0, 0, 0, 0, self.room - self.asking))


@dataclass(frozen=True)
class InTurn:
    """One exchange, and of what it gives another."""

    first: TokenExchange
    then: TokenExchange

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """The first's, exchanged by the second."""
        return self.then.gather_tokens(*self.first.gather_tokens(q, k, v))

    def gather_heads(self, output: Tensor) -> Tensor:
        """All the way back."""
        return self.first.gather_heads(self.then.gather_heads(output))


class _Gathered(torch.autograd.Function):
    """Rows (r, ...) of g ranks, (g r, ...); each is given the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


def gathered(rows: Tensor, group: Any) -> Tensor:
    """The rows (r, ...) of all g ranks, one rank's after another's, (g r, ...)."""
    rows = rows.contiguous()
    found = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(found, rows, group=group)
    return found


def summed(rows: Tensor, group: Any) -> Tensor:
    """What g ranks have for the rows of each, (g r, ...), added up for this one's, (r, ...).

    It sends what a reduce-scatter does, which in 16 bits would round at each of its additions.
    """
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    wide = torch.promote_types(rows.dtype, torch.float32)
    parts = received.unflatten(0, (dist.get_world_size(group), -1))
    return parts.sum(0, dtype=wide).to(rows.dtype)
