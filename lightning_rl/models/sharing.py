"""How ranks share a pack's tokens: as they come, where all attend for all, or dealt by work.

Ranks share attention's heads, and where there are fewer heads than ranks its queries, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from lightning_rl.models.attention import Attending, TokenExchange
from lightning_rl.models.attention_batches import Segments, places_of
from lightning_rl.models.key_exchange import InTurn, KeyExchange
from lightning_rl.models.query_shares import PlacedQueries, deal, tokens_of


def head_counts(config: PretrainedConfig, parts: int = 1) -> tuple[int, int]:
    """A layer's query heads and key heads, in each of so many parts of a model's matrices."""
    text = config.get_text_config()
    query: int = text.num_attention_heads
    key: int = getattr(text, "num_key_value_heads", None) or query
    return query // parts, key // parts


def head_ranks(ranks: int, query: int, key: int) -> int:
    """How many of so many ranks share a model's heads; the others share queries.

    The most that divide the ranks and the query heads, and divide or are divided by the key heads:
    these are copied where there are fewer.
    """
    return next(
        size
        for size in range(min(ranks, query), 0, -1)
        if ranks % size == 0 and query % size == 0 and (key % size == 0 or size % key == 0)
    )


class Dealt(NamedTuple):
    """How n ranks have a pack's row of S tokens, each a share of s.

    ``order`` (n s,), on the CPU: the tokens of one rank after another, as their places in the row;
    -1: none. ``seen`` is what this rank's queries see, None: all are its queries.
    """

    order: Tensor
    exchange: TokenExchange | None
    seen: Attending | None


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
        return Dealt(order.masked_fill(order >= count, -1), exchange, None)


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
        seen = PlacedQueries.of(segments, dealt[self.place], places_of(order, count))
        exchange: TokenExchange = KeyExchange(self.others, room, int(seen.asking.sum()))
        if self.exchange is not None:
            exchange = InTurn(self.exchange(room), exchange)
        return Dealt(order, exchange, seen)
