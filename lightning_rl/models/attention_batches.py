"""Packed attention in as few calls of SDPA as padding allows, for devices without a fused kernel.

Segments of like length share a call, padded. Completions that see a prompt need a mask of queries x
keys, which for long ones would be larger than all else: those run together with their prompt
instead, under the causal flag, for which no mask is made.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rl.models.varlen import Varlen, build_varlen

# Segments of like length share one SDPA call; more padding than this share opens a new batch.
MAX_PADDING = 0.3
# Bound on the elements of one batch's scores (N x Lq x Lk), and so on its mask's memory.
MAX_SCORES = 1 << 24
# Elements of one completion's mask above which the causal flag takes its place.
MAX_MASK = 1 << 20


@dataclass(frozen=True)
class Segments:
    """The segments of a pack's row of S tokens: distinct prompts, then rollouts' completions.

    All on the CPU. ``start`` and ``length`` (N,): the place of each segment in the row, one behind
    the other; ``prompt`` (M,): the segment of each of the M completions' prompt, the last M of N.
    """

    start: Tensor
    length: Tensor
    prompt: Tensor

    @property
    def prompts(self) -> int:
        """Number of segments that are prompts."""
        return len(self.start) - len(self.prompt)

    @property
    def prefix(self) -> tuple[Tensor, Tensor]:
        """Start and length (M,) of the tokens that each completion sees before itself."""
        return self.start[self.prompt], self.length[self.prompt]

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """Start and length (N,) of what each segment sees before itself; prompts see nothing."""
        nothing = torch.zeros(self.prompts, dtype=torch.long, device="cpu")
        start, length = self.prefix
        return torch.cat([nothing, start]), torch.cat([nothing, length])

    @property
    def pieces(self) -> "Pieces":
        """What all queries of the row see: each segment is a piece of its own."""
        rows = torch.arange(int(self.length.sum()), device="cpu")
        return Pieces(self.start, self.length, *self.before, self.length, rows)

    def batches(self) -> "AttentionBatches":
        """For calls of SDPA."""
        return batch_segments(self)

    def varlen(self) -> Varlen:
        """For one call of a fused kernel."""
        return build_varlen(self.start, self.length, *self.before)


@dataclass(frozen=True)
class Pieces:
    """What some queries see: N pieces of segments, each the last ``asking`` tokens of what it sees.

    All on the CPU. ``start`` and ``length`` (N,): of a piece's segment up to its end, in the pack's
    row of S tokens, and ``prefix_start`` and ``prefix_length`` (N,) of what is seen before that.
    Queries are those of the pieces, one behind the other; ``rows`` (S,) say which row of keys is
    that of each token.
    """

    start: Tensor
    length: Tensor
    prefix_start: Tensor
    prefix_length: Tensor
    asking: Tensor
    rows: Tensor

    @property
    def pieces(self) -> "Pieces":
        """Itself, as :class:`Segments` has them."""
        return self

    @property
    def earlier(self) -> Tensor:
        """Tokens (N,) that all queries of a piece see."""
        return self.prefix_length + self.length - self.asking

    @property
    def first(self) -> Tensor:
        """The first query (N,) of each piece."""
        return self.asking.cumsum(0) - self.asking

    def masked(self, part: Tensor) -> "AttentionBatch":
        """Some of the pieces in one call, with a mask."""
        start, length, asking = (x[part] for x in (self.start, self.length, self.asking))
        before, _ = joined(
            self.prefix_start[part], self.prefix_length[part], start, length - asking
        )
        own = index_of(start + length - asking, asking)
        return masked_batch(index_of(self.first[part], asking), self.row(before), self.row(own))

    def row(self, token: Tensor) -> Tensor:
        """The rows of tokens' keys; -1 of padding."""
        return torch.where(token < 0, -1, self.rows[token])


@dataclass(slots=True)
class AttentionBatch:
    """Segments attended in one SDPA call: N segments, padded to Lq queries and Lk keys.

    ``query`` (N, Lq) and ``key`` (N, Lk) index rows of queries and of keys, -1 where padded: the
    pack's S tokens, where one process has them all. ``mask`` (N, 1, Lq, Lk) is True where a query
    may look; None means plain causal attention, where padding on the right is never looked at.
    ``prepared`` is what a way to compute it has worked out of them once, for all layers.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    prepared: dict[Any, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "AttentionBatch":
        """On another device, with padding pointing at token 0 (its outputs are never read)."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
        query, key = (x.clamp(min=0).to(device, non_blocking=True) for x in (self.query, self.key))
        return type(self)(query, key, mask)

    def mask_for(self, query: Tensor) -> Tensor | None:
        """``mask``, as SDPA takes it beside such queries."""
        return self.mask


class EndAligned(AttentionBatch):
    """One segment whose Lq queries are its last tokens, from the last to the first, without a mask.

    They see Lk keys, one fewer each. So each row of the mask is the one before, shifted by a place:
    all are views of one row.
    """

    def mask_for(self, query: Tensor) -> Tensor:
        """(1, 1, Lq, Lk) of Lq + Lk - 1 numbers, which all layers share."""
        if query.dtype not in self.prepared:
            queries, keys = self.query.shape[1], self.key.shape[1]
            row = torch.zeros(keys + queries - 1, dtype=query.dtype, device=query.device)
            row[keys:] = -torch.inf
            self.prepared[query.dtype] = row.as_strided((1, 1, queries, keys), (0, 0, 1, 1))
        mask: Tensor = self.prepared[query.dtype]
        return mask


@dataclass(slots=True)
class AttentionBatches:
    """All of Q queries; ``restore`` (Q,) picks the output of each from theirs, concatenated."""

    parts: list[AttentionBatch]
    restore: Tensor

    def to(self, device: torch.device) -> "AttentionBatches":
        """On another device."""
        parts = [part.to(device) for part in self.parts]
        return AttentionBatches(parts, self.restore.to(device, non_blocking=True))


def batch_segments(segments: Segments) -> AttentionBatches:
    """Cut a pack's attention into SDPA calls, on the CPU.

    Its work and memory are in proportion to tokens and padding, but for masks of at most
    ``MAX_MASK`` elements a completion; one of a shared prompt that is longer than the completion
    has as many as attention has scores.
    """
    count, size = segments.prompts, int(segments.length.sum())
    start, length = segments.start[count:], segments.length[count:]
    prefix_start, prefix_length = segments.prefix
    whole = _whole(segments)
    provider = _providers(segments.prompt, whole, count)
    alone = torch.ones(count, dtype=torch.bool, device="cpu")
    alone[segments.prompt[provider]] = False  # the others' outputs come from a whole rollout
    nothing = torch.zeros(len(segments.start), dtype=torch.long, device="cpu")
    parts = [
        *(
            _causal_batch(segments.start[part], segments.length[part])
            for part in parts_of(alone, segments.length[:count], nothing[:count])
        ),
        *(
            _suffix_batch(start[part], length[part], prefix_start[part], prefix_length[part])
            for part in parts_of(~whole, length, prefix_length)
        ),
        *(
            _whole_batch(
                start[part], length[part], prefix_start[part], prefix_length[part], provider[part]
            )
            for part in parts_of(whole, prefix_length + length, nothing[count:])
        ),
    ]
    return restored(parts, size)


def restored(parts: list[AttentionBatch], queries: int) -> AttentionBatches:
    """Batches that each of so many queries is in once."""
    slots = torch.cat([batch.query.flatten() for batch in parts])
    return AttentionBatches(parts, places_of(slots, queries))


def places_of(slots: Tensor, count: int) -> Tensor:
    """Where in ``slots`` (n,), which has -1 where there is nothing, each of so many numbers is."""
    places = torch.empty(count, dtype=torch.long, device="cpu")
    places[slots[slots >= 0]] = (slots >= 0).nonzero().squeeze(1)
    return places


def _whole(segments: Segments) -> Tensor:
    """Mask (M,) of completions that run after their prompt in one causal call, without a mask.

    Long ones, where that computes fewer scores: (P + L)^2 / 2 instead of the L (P + L) of a mask if
    the completion is the longer part; and always fewer if no other shares the prompt, for the
    prompt's own scores are among them.
    """
    length, (_, prefix) = segments.length[segments.prompts :], segments.prefix
    users = torch.bincount(segments.prompt, minlength=segments.prompts)[segments.prompt]
    return (length * (prefix + length) > MAX_MASK) & ((length >= prefix) | (users == 1))


def _providers(prompt: Tensor, whole: Tensor, count: int) -> Tensor:
    """The first whole rollout of each prompt, as a mask (M,): the one its outputs come from."""
    rows = whole.nonzero().squeeze(1)
    none = len(prompt)
    first = torch.full((count,), none, dtype=torch.long, device="cpu")
    first.scatter_reduce_(0, prompt[rows], rows, "amin")
    provider = torch.zeros_like(whole)
    provider[first[first < none]] = True
    return provider


def parts_of(chosen: Tensor, length: Tensor, prefix: Tensor) -> list[Tensor]:
    """The chosen ones of segments (N,), as indices of those that share a call.

    Sorted by size, cut where padding or the score matrix would grow too large.
    """
    rows = chosen.nonzero().squeeze(1)
    parts: list[list[int]] = []
    lengths, prefixes = length[rows].tolist(), prefix[rows].tolist()
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i] + prefixes[i], lengths[i]))
    real = lq = lp = 0
    for i in order:
        if lengths[i] == 0:  # a one-token completion has no token to run
            continue
        lq, lp = max(lq, lengths[i]), max(lp, prefixes[i])
        real += lengths[i] + prefixes[i]
        count = len(parts[-1]) + 1 if parts else 0
        padded = count * (lq + lp)
        if not parts or padded > (1 + MAX_PADDING) * real or count * lq * (lq + lp) > MAX_SCORES:
            parts.append([])
            lq, lp, real = lengths[i], prefixes[i], lengths[i] + prefixes[i]
        parts[-1].append(i)
    return [rows[torch.tensor(part, device="cpu")] for part in parts]


def _steps(length: Tensor) -> Tensor:
    return torch.arange(int(length.max()), device="cpu")


def index_of(start: Tensor, length: Tensor) -> Tensor:
    """Consecutive positions per segment, padded with -1 on the right: (N, max length)."""
    steps = _steps(length)
    return torch.where(steps < length[:, None], start[:, None] + steps, -1)


def joined(
    prefix_start: Tensor, prefix_length: Tensor, start: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions of a prefix and what follows it per segment, padded as :func:`index_of` does.

    And a mask of those in the prefix, both (N, longest).
    """
    steps = _steps(prefix_length + length)
    in_prefix = steps < prefix_length[:, None]
    place = steps + torch.where(in_prefix, prefix_start[:, None], (start - prefix_length)[:, None])
    return place.where(steps < (prefix_length + length)[:, None], -1), in_prefix


def _causal_batch(start: Tensor, length: Tensor) -> AttentionBatch:
    index = index_of(start, length)
    return AttentionBatch(index, index, None)


def _suffix_batch(
    start: Tensor, length: Tensor, prefix_start: Tensor, prefix_length: Tensor
) -> AttentionBatch:
    query = index_of(start, length)
    return masked_batch(query, index_of(prefix_start, prefix_length), query)


def masked_batch(query: Tensor, before: Tensor, own: Tensor) -> AttentionBatch:
    """Queries (N, Lq) on their ``own`` keys (N, Lq), causally, and on all ``before`` them (N, Lp).

    Each is padded by itself; a mask marks the visible keys.
    """
    steps = torch.arange(query.shape[1], device="cpu")
    causal = (steps[:, None] >= steps).expand(len(query), -1, -1)
    seen = (before >= 0)[:, None].expand(-1, query.shape[1], -1)
    return AttentionBatch(query, torch.cat([before, own], 1), torch.cat([seen, causal], 2)[:, None])


def _whole_batch(
    start: Tensor, length: Tensor, prefix_start: Tensor, prefix_length: Tensor, provider: Tensor
) -> AttentionBatch:
    """Prompt and completion without a gap; the prompt's outputs come from ``provider`` only."""
    key, in_prompt = joined(prefix_start, prefix_length, start, length)
    return AttentionBatch(key.masked_fill(in_prompt & ~provider[:, None], -1), key, None)
