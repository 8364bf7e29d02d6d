"""Ways in which ranks share a micro-batch's tokens: in order, or dealt by work.

Ranks share attention's heads, and where there are fewer heads than ranks its queries, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from lightning_rl.models.attention.batches import Segments, places_of
from lightning_rl.models.attention.packed import Attending, TokenExchange
from lightning_rl.models.parallel.keys import InTurn, KeyExchange
from lightning_rl.models.parallel.queries import PlacedQueries, deal, tokens_of


def head_counts(config: PretrainedConfig, parts: int = 1) -> tuple[int, int]:
    """Return a layer's query and key heads, in each of ``parts`` parts of a model's matrices."""
    text = config.get_text_config()
    query: int = text.num_attention_heads
    key: int = getattr(text, "num_key_value_heads", None) or query
    return query // parts, key // parts


def head_ranks(ranks: int, query: int, key: int) -> int:
    """Return how many of the ranks share a model's heads; the remaining factor shares queries.

    It is the largest number that divides the ranks and the query heads, and divides or is divided
    by the key heads, which are copied if there are fewer.
    """
    return next(
        size
        for size in range(min(ranks, query), 0, -1)
        if ranks % size == 0 and query % size == 0 and (key % size == 0 or size % key == 0)
    )


class Dealt(NamedTuple):
    """The distribution of a micro-batch's row of S tokens over n ranks, s each.

    ``order`` (n s,), on the CPU: the tokens of each rank in turn, as indices into the row; -1 for
    padding. ``seen`` is what this rank's queries see; None: all tokens are its queries.
    """

    order: Tensor
    exchange: TokenExchange | None
    seen: Attending | None


class Sharing(Protocol):
    """A way in which ranks share a micro-batch's tokens."""

    def deal(self, segments: Segments) -> Dealt:
        """Deal the tokens of a micro-batch's segments; all ranks call it with the same segments."""


@dataclass(frozen=True)
class HeadSharing:
    """Each of n ranks has the tokens that follow those of the previous rank.

    Every rank computes attention for all tokens, so it does not matter which ones it has.

    Args:
        ranks: the number n of ranks.
        exchange: makes the exchange of heads for a number of tokens; None: there is only one rank.
    """

    ranks: int
    exchange: Callable[[int], TokenExchange] | None

    def deal(self, segments: Segments) -> Dealt:
        """Deal the tokens, as :class:`Sharing` describes."""
        count = int(segments.length.sum())
        order = torch.arange(-(-count // self.ranks) * self.ranks, device="cpu")
        exchange = None if self.exchange is None else self.exchange(count)
        return Dealt(order.masked_fill(order >= count, -1), exchange, None)


@dataclass(frozen=True)
class QuerySharing:
    """Ranks are in g places of u: those of a place share heads, and places the queries.

    Args:
        place: this rank's place.
        others: the ranks of all places that have the same heads as this one, in order.
        places: the number g of places.
        ranks: the number u of ranks of a place.
        exchange: makes the exchange of a place's heads for a number of tokens; None: a place has
            only one rank.
    """

    place: int
    others: Any
    places: int
    ranks: int
    exchange: Callable[[int], TokenExchange] | None

    def deal(self, segments: Segments) -> Dealt:
        """Deal the tokens, as :class:`Sharing` describes."""
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
