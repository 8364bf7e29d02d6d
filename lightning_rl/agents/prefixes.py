"""Prefixes: finds the longest of a rollout's rows that a prompt begins with, by hashes."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from lightning_rl.engines.prefix_cache import TextHash
from lightning_rl.rollout import SAMPLED_BY, Row, SamplingDistribution

_settings = attrgetter(*SAMPLED_BY)
_RECENT = 8
"""Rows a prompt is compared with first: up to this many concurrent chats need no hash lookup."""


@dataclass(slots=True)
class _Kind:
    """Rows of one role and sampling: ``places`` maps a length and hash to the rows that have them.

    Each list of places is a heap. A row that grows leaves a stale entry behind, which never becomes
    valid again. ``counts`` holds the number of rows of each length; ``lengths`` are these lengths,
    ascending; ``recent`` are the rows that grew last.
    """

    places: defaultdict[tuple[int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    counts: Counter[int] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    recent: dict[int, None] = field(default_factory=dict)


class Prefixes:
    """Finds the row that a prompt continues, without comparing the prompt with every row.

    Rows only grow; report each growth to :meth:`grown`.

    Args:
        rows: the rows to index, except a first row without tokens, which has no role yet.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._texts: dict[int, TextHash] = {}
        self._kinds: defaultdict[tuple[Hashable, ...], _Kind] = defaultdict(_Kind)
        for index, row in enumerate(rows):
            if index or row.token_ids:
                self.grown(index)

    def grown(self, place: int) -> None:
        """Index a new row, or the tokens that were appended to one."""
        row = self._rows[place]
        kind = self._kinds[_kind_of(row.role, row.sampling)]
        before = self._texts.get(place)
        if before is None:
            text = TextHash().then(row.prompt_ids).then(row.token_ids)
        else:
            text = before.then(row.token_ids[before.length - len(row.prompt_ids) :])
        kind.recent.pop(place, None)
        kind.recent[place] = None
        if len(kind.recent) > _RECENT:
            del kind.recent[next(iter(kind.recent))]
        if text == before:
            return
        self._texts[place] = text
        if before is not None:
            kind.counts[before.length] -= 1
            if not kind.counts[before.length]:
                del kind.lengths[bisect_left(kind.lengths, before.length)]
        if not kind.counts[text.length]:
            insort(kind.lengths, text.length)
        kind.counts[text.length] += 1
        heappush(kind.places[text.length, text.hash], place)

    def longest(
        self,
        prompt: list[int],
        role: str,
        sampling: SamplingDistribution | None,
        may: Callable[[Row], bool] = lambda row: True,
    ) -> int | None:
        """Return the place of the longest row of that role and sampling ``prompt`` begins with.

        Among equally long rows, return the first. Only rows for which ``may`` is true count.
        """
        kind = self._kinds.get(_kind_of(role, sampling))
        if kind is None:
            return None
        recent = self._recent(kind, prompt)
        for begun in TextHash() if recent is None else self._texts[recent], TextHash():
            hashes = [begun.hash, *begun.hashes(prompt[begun.length :])]
            first = bisect_left(kind.lengths, begun.length)
            last = bisect_right(kind.lengths, len(prompt))
            for length in reversed(kind.lengths[first:last]):
                for place in self._at(kind, length, hashes[length - begun.length]):
                    row = self._rows[place]
                    if may(row) and (place == recent or begins(prompt, row)):
                        return place
        return None

    def recent(
        self, prompt: list[int], role: str, sampling: SamplingDistribution | None
    ) -> int | None:
        """Return the place of a recently grown row that ``prompt`` begins with: one of several."""
        kind = self._kinds.get(_kind_of(role, sampling))
        return None if kind is None else self._recent(kind, prompt)

    def _recent(self, kind: _Kind, prompt: list[int]) -> int | None:
        rows = self._rows
        fitting = (
            place
            for place in reversed(kind.recent)
            if rows[place].length <= len(prompt) and begins(prompt, rows[place])
        )
        return next(fitting, None)

    def _at(self, kind: _Kind, length: int, number: int) -> Iterator[int]:
        """Yield the places of rows of this length and hash, in ascending order."""
        places = kind.places.get((length, number), [])
        while places and self._texts[places[0]].length != length:
            heappop(places)
        if places:
            yield places[0]
            yield from (p for p in sorted(places)[1:] if self._texts[p].length == length)


def _kind_of(role: str, sampling: SamplingDistribution | None) -> tuple[Hashable, ...]:
    return (role, *_settings(sampling)) if sampling is not None else (role,)


def begins(prompt: list[int], row: Row) -> bool:
    """Tell whether a prompt begins with a row's tokens."""
    begin, end = len(row.prompt_ids), row.length
    # From the end, where rows that share their beginning differ.
    return prompt[begin:end] == row.token_ids and prompt[:begin] == row.prompt_ids
