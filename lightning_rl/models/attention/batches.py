"""Packed attention in as few calls of SDPA as padding allows, for devices without a fused kernel.

Segments of similar length share a padded call. Completions that see a prompt need a mask of queries
x keys, which would dominate memory for long ones: these run together with their prompt instead,
with SDPA's causal flag, which needs no mask.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rl.models.attention.varlen import Varlen, build_varlen

# Segments of like length share one SDPA call; more padding than this share opens a new batch.
MAX_PADDING = 0.3
# Bound on the elements of one batch's scores (N x Lq x Lk), and so on its mask's memory.
MAX_SCORES = 1 << 24
# Elements of one completion's mask above which the causal flag takes its place.
MAX_MASK = 1 << 20


@dataclass(frozen=True)
class Segments:
    """The segments of a micro-batch's S tokens: distinct prompts, then rollouts' completions.

    All tensors are on the CPU. ``start`` and ``length`` (N,): the place of each segment in the row,
    consecutive; ``prompt`` (M,): the prompt's segment of each of the M completions, which are the
    last M of the N segments.
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
        """Start and length (N,) of the tokens each segment sees before itself; none for prompts."""
        nothing = torch.zeros(self.prompts, dtype=torch.long, device="cpu")
        start, length = self.prefix
        return torch.cat([nothing, start]), torch.cat([nothing, length])

    @property
    def pieces(self) -> "Pieces":
        """The tokens that all queries of the row see, with one piece per segment."""
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
    """N pieces of segments; the last ``asking`` tokens of each piece are queries, which see it.

    All tensors are on the CPU. ``start`` and ``length`` (N,) give each piece's segment up to the
    piece's end, in the micro-batch's row of S tokens, and ``prefix_start`` and ``prefix_length``
    (N,) the tokens seen before that. Queries are those of the pieces, consecutively; ``rows`` (S,)
    gives the row of keys of each token.
    """

    start: Tensor
    length: Tensor
    prefix_start: Tensor
    prefix_length: Tensor
    asking: Tensor
    rows: Tensor

    @property
    def pieces(self) -> "Pieces":
        """Itself: the interface of :class:`Segments`."""
        return self

    @property
    def earlier(self) -> Tensor:
        """Numbers (N,) of tokens that all queries of a piece see."""
        return self.prefix_length + self.length - self.asking

    @property
    def first(self) -> Tensor:
        """Indices (N,) of the first query of each piece."""
        return self.asking.cumsum(0) - self.asking

    def masked(self, part: Tensor) -> "AttentionBatch":
        """Return a batch of some pieces in one call, with a mask."""
        start, length, asking = (x[part] for x in (self.start, self.length, self.asking))
        before, _ = joined(
            self.prefix_start[part], self.prefix_length[part], start, length - asking
        )
        own = index_of(start + length - asking, asking)
        return masked_batch(index_of(self.first[part], asking), self.row(before), self.row(own))

    def row(self, token: Tensor) -> Tensor:
        """Return the rows of tokens' keys; -1 for padding."""
        return torch.where(token < 0, -1, self.rows[token])


@dataclass(slots=True)
class AttentionBatch:
    """Segments attended in one SDPA call: N segments, padded to Lq queries and Lk keys.

    ``query`` (N, Lq) and ``key`` (N, Lk) index rows of queries and of keys, -1 for padding; the
    rows are the micro-batch's S tokens if one process has them all. ``mask`` (N, 1, Lq, Lk) is True
    where a query sees a key; None means plain causal attention, in which no query sees padding on
    the right. ``prepared`` caches values that all layers share.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    prepared: dict[Any, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "AttentionBatch":
        """Copy to another device, with padding pointing at token 0 (its outputs are never read)."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
        query, key = (x.clamp(min=0).to(device, non_blocking=True) for x in (self.query, self.key))
        return type(self)(query, key, mask)

    def mask_for(self, query: Tensor) -> Tensor | None:
        """Return the mask in the form that SDPA takes with such queries."""
        return self.mask


class EndAligned(AttentionBatch):
    """One segment whose Lq queries are its last tokens in reverse order, without a stored mask.

    The first sees Lk keys, each further one a key less. So each row of the mask is the previous one
    shifted by one, and all are views of a single row.
    """

    def mask_for(self, query: Tensor) -> Tensor:
        """Return a mask (1, 1, Lq, Lk) backed by Lq + Lk - 1 numbers, which all layers share."""
        if query.dtype not in self.prepared:
            queries, keys = self.query.shape[1], self.key.shape[1]
            row = torch.zeros(keys + queries - 1, dtype=query.dtype, device=query.device)
            row[keys:] = -torch.inf
            self.prepared[query.dtype] = row.as_strided((1, 1, queries, keys), (0, 0, 1, 1))
        mask: Tensor = self.prepared[query.dtype]
        return mask


@dataclass(slots=True)
class AttentionBatches:
    """Batches of all Q queries; ``restore`` (Q,) picks each output from their concatenation."""

    parts: list[AttentionBatch]
    restore: Tensor

    def to(self, device: torch.device) -> "AttentionBatches":
        """Copy to another device."""
        parts = [part.to(device) for part in self.parts]
        return AttentionBatches(parts, self.restore.to(device, non_blocking=True))


def batch_segments(segments: Segments) -> AttentionBatches:
    """Cut a micro-batch's attention into SDPA calls, on the CPU.

    Work and memory are proportional to tokens and padding, plus masks of at most ``MAX_MASK``
    elements per completion; only for a completion shorter than its shared prompt may the mask be
    larger, with one element per attention score.
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
    """Combine batches that contain each of ``queries`` queries exactly once."""
    slots = torch.cat([batch.query.flatten() for batch in parts])
    return AttentionBatches(parts, places_of(slots, queries))


def places_of(slots: Tensor, count: int) -> Tensor:
    """Return the place in ``slots`` (n,) of each number below ``count``; -1 marks empty slots."""
    places = torch.empty(count, dtype=torch.long, device="cpu")
    places[slots[slots >= 0]] = (slots >= 0).nonzero().squeeze(1)
    return places


def _whole(segments: Segments) -> Tensor:
    """Select completions (M,) that run together with their prompt in one causal call.

    These are long ones for which that computes fewer scores: (P + L)^2 / 2 instead of L (P + L)
    with a mask, if the completion is longer than its prompt; and always if no other completion
    shares the prompt, whose own scores are included.
    """
    length, (_, prefix) = segments.length[segments.prompts :], segments.prefix
    users = torch.bincount(segments.prompt, minlength=segments.prompts)[segments.prompt]
    return (length * (prefix + length) > MAX_MASK) & ((length >= prefix) | (users == 1))


def _providers(prompt: Tensor, whole: Tensor, count: int) -> Tensor:
    """Return a mask (M,) of the first whole rollout of each prompt, which computes its outputs."""
    rows = whole.nonzero().squeeze(1)
    none = len(prompt)
    first = torch.full((count,), none, dtype=torch.long, device="cpu")
    first.scatter_reduce_(0, prompt[rows], rows, "amin")
    provider = torch.zeros_like(whole)
    provider[first[first < none]] = True
    return provider


def parts_of(chosen: Tensor, length: Tensor, prefix: Tensor) -> list[Tensor]:
    """Divide the chosen segments (N,) into calls, given as lists of indices.

    Segments are sorted by size, and split where padding or the score matrix would get too large.
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
    """Return consecutive positions per segment, padded with -1 on the right: (N, max length)."""
    steps = _steps(length)
    return torch.where(steps < length[:, None], start[:, None] + steps, -1)


def joined(
    prefix_start: Tensor, prefix_length: Tensor, start: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the positions of a prefix and the tokens after it per segment, as :func:`index_of`.

    Also return a mask of those in the prefix; both are (N, longest).
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
    """Make a batch: queries (N, Lq) on ``own`` keys (N, Lq), causally, and all ``before`` (N, Lp).

    Each part is padded separately; a mask marks the visible keys.
    """
    steps = torch.arange(query.shape[1], device="cpu")
    causal = (steps[:, None] >= steps).expand(len(query), -1, -1)
    seen = (before >= 0)[:, None].expand(-1, query.shape[1], -1)
    return AttentionBatch(query, torch.cat([before, own], 1), torch.cat([seen, causal], 2)[:, None])


def _whole_batch(
    start: Tensor, length: Tensor, prefix_start: Tensor, prefix_length: Tensor, provider: Tensor
) -> AttentionBatch:
    """Make a batch of whole rollouts; a prompt's outputs come from its ``provider`` only."""
    key, in_prompt = joined(prefix_start, prefix_length, start, length)
    return AttentionBatch(key.masked_fill(in_prompt & ~provider[:, None], -1), key, None)
