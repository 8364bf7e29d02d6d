"""Deals a micro-batch's tokens to several places that have the same heads.

Causal attention costs a query as many products as it sees keys, so that the end of a rollout costs
most. Each place gets as many tokens as the others, and about as much of that work: of a long
segment the k-th of 2g pieces and the k-th from its end (as Llama 3's context parallelism has it,
arXiv 2407.21783 section 3.3.2), and short ones as they are, the most work first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.data.batch import ranges
from lightning_rl.models.attention.batches import (
    AttentionBatch,
    AttentionBatches,
    EndAligned,
    Pieces,
    Segments,
    index_of,
    joined,
    parts_of,
    restored,
)
from lightning_rl.models.attention.varlen import Varlen, build_varlen

SHORT = 8
"""A segment that is this small a part of a place's tokens stays whole: a few of them even out, and
each piece's keys are gathered for it anew."""
MASKED = 1 << 16
"""Most elements of a piece's mask, for which pieces share a call of SDPA. Larger ones have a call
each, which needs none; it must not be short
(:mod:`lightning_rl.models.attention.short_segments`)."""


class Piece(NamedTuple):
    """The tokens ``begin`` to ``end`` of a segment."""

    segment: int
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    def work(self, before: Sequence[int]) -> int:
        """Return the number of keys that all queries see, ``before`` the segment and in it."""
        inside = (self.end * (self.end + 1) - self.begin * (self.begin + 1)) // 2
        return self.tokens * before[self.segment] + inside


def deal(
    lengths: Sequence[int], before: Sequence[int], places: int, room: int
) -> list[list[Piece]]:
    """Return each place's pieces of segments with these lengths and numbers of tokens ``before``.

    A place has room for ``room`` tokens, and all together have room for all.
    """
    dealt: list[list[Piece]] = [[] for _ in range(places)]
    left, work = [room] * places, [0] * places

    def give(place: int, piece: Piece) -> None:
        if piece.tokens:
            dealt[place].append(piece)
            left[place] -= piece.tokens
            work[place] += piece.work(before)

    total, short = sum(lengths), list[Piece]()
    for segment, length in enumerate(lengths):
        if length * SHORT * places <= total:
            short.append(Piece(segment, 0, length))
            continue
        # What does not divide goes to those with the most room, and then the least work.
        order = sorted(range(places), key=lambda place: (-left[place], work[place]))
        begin, end = 0, length
        for turn, place in enumerate(order[:-1]):
            count = length // places + (turn < length % places)
            front, back = begin + count // 2, end - (count - count // 2)
            give(place, Piece(segment, begin, front))
            give(place, Piece(segment, back, end))
            begin, end = front, back
        give(order[-1], Piece(segment, begin, end))  # the middle, where both meet
    short.sort(key=lambda piece: piece.work(before))
    while short:
        piece = short.pop()
        roomy = [place for place in range(places) if left[place] >= piece.tokens]
        if roomy:
            give(min(roomy, key=lambda place: work[place]), piece)
            continue
        widest = max(range(places), key=lambda place: left[place])
        cut = piece.begin + left[widest]
        give(widest, piece._replace(end=cut))
        short.append(piece._replace(begin=cut))
    return [sorted(pieces) for pieces in dealt]


def most_keys(segments: Segments, places: int) -> int:
    """Return the largest number of keys that a place's kernel reads, over all its pieces."""
    _, before = segments.before
    lengths, prefixes = segments.length.tolist(), before.tolist()
    dealt = deal(lengths, prefixes, places, -(-sum(lengths) // places))
    return max(sum(prefixes[piece.segment] + piece.end for piece in pieces) for pieces in dealt)


class PlacedQueries(Pieces):
    """The tokens that the queries of one place see."""

    @classmethod
    def of(cls, segments: Segments, pieces: Sequence[Piece], rows: Tensor) -> "PlacedQueries":
        """Make these from pieces of segments; without any, one query sees the first token."""
        pieces = pieces or [Piece(int(segments.length.nonzero()[0]), 0, 1)]
        segment, begin, end = torch.tensor(pieces, device="cpu").unbind(1)
        prefix_start, prefix_length = (x[segment] for x in segments.before)
        return cls(segments.start[segment], end, prefix_start, prefix_length, end - begin, rows)

    def batches(self) -> AttentionBatches:
        """For calls of SDPA, in memory that is in proportion to queries and keys."""
        scores = self.asking * (self.prefix_length + self.length)
        parts = [
            self.masked(part) for part in parts_of(scores <= MASKED, self.asking, self.earlier)
        ]
        parts += [self._alone(part) for part in (scores > MASKED).nonzero().unbind()]
        return restored(parts, int(self.asking.sum()))

    def _alone(self, part: Tensor) -> AttentionBatch:
        key, _ = joined(
            *(x[part] for x in (self.prefix_start, self.prefix_length, self.start, self.length))
        )
        return EndAligned(
            index_of(self.first[part], self.asking[part]).flip(1), self.row(key), None
        )

    def varlen(self) -> Varlen:
        """For one call of a fused kernel."""
        result = build_varlen(
            self.start, self.length, self.prefix_start, self.prefix_length, self.asking
        )
        result.keys = self.rows[result.keys]
        return result


def tokens_of(segments: Segments, pieces: Sequence[Piece]) -> Tensor:
    """Return the indices of some pieces' tokens in the micro-batch's row, piece after piece."""
    given = torch.tensor(pieces, dtype=torch.long, device="cpu").reshape(-1, 3)
    segment, begin, end = given.unbind(1)
    return ranges(segments.start[segment] + begin, end - begin)
