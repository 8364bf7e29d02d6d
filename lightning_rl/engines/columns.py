"""Columns: keys and values of rows that are written side by side, and of their beginnings."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from lightning_rl.engines.kept_texts import KeptText

LEAST_ROOM = 32
"""Columns that a cache gets beyond those it needs: each time it runs out of them, all is copied."""


class Columns(DynamicLayer):
    """One layer's keys and values (N, H, T, D) of N rows whose last token is the last column.

    Rows that are shorter begin in later columns. They lie in memory column by column, (T, N, H, D),
    with room behind them that nothing touches yet: a column that is added is written in one piece,
    where to concatenate would copy all, every time.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._hold([_by_column(part) for part in (keys, values)], keys.shape[-2])

    def _hold(self, parts: list[Tensor], width: int) -> None:
        """Keep keys and values by column, of which so many are in use."""
        self._parts = parts
        self.keys, self.values = (part[:width].permute(1, 2, 0, 3) for part in parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        width = self.get_seq_length()
        more = width + key_states.shape[-2]
        parts = self._parts
        if more > len(parts[0]):
            parts = [_with_room(part[:width], more + max(width, LEAST_ROOM)) for part in parts]
        for part, new in zip(parts, (key_states, value_states), strict=True):
            part[width:more] = _by_column(new)
        self._hold(parts, more)
        return self.keys, self.values

    def keep(self, rows: Tensor, first: int) -> None:
        """Only these rows (n,), from this column on."""
        width = self.get_seq_length()
        self._hold([part[first:width, rows] for part in self._parts], width - first)

    def join(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Add, as rows, of other keys and values those of ``rows`` (n,)."""
        old, new = self.get_seq_length(), keys.shape[-2]
        width = max(old, new)
        parts = [
            torch.cat([_aligned(mine[:old], width), _aligned(_by_column(theirs[rows]), width)], 1)
            for mine, theirs in zip(self._parts, (keys, values), strict=True)
        ]
        self._hold(parts, width)


def _by_column(part: Tensor) -> Tensor:
    """(N, H, T, D) as (T, N, H, D)."""
    return part.permute(2, 0, 1, 3)


def _aligned(part: Tensor, width: int) -> Tensor:
    """Columns (T, N, H, D) as the last of so many; those before them are empty."""
    return F.pad(part, (0, 0, 0, 0, 0, 0, width - len(part), 0))


def _with_room(part: Tensor, columns: int) -> Tensor:
    """A copy with so many columns in all; those behind its own hold anything."""
    wider = part.new_empty(columns, *part.shape[1:])
    wider[: len(part)] = part
    return wider


def begun_cache(kept: Sequence[KeptText | None], starts: Tensor, columns: int) -> Cache:
    """A cache of so many columns for N rows that begin in ``starts`` (N,), of what is kept."""
    if columns <= 0:
        return DynamicCache()
    counts = [columns - start for start in starts.tolist()]
    texts = [text for text in kept if text is not None]  # all of them, if there are columns

    def column(layer: int, part: int) -> Tensor:
        rows = []
        for text, count in zip(texts, counts, strict=True):
            own = text.layers[layer][part][:, : max(count, 0)]
            rows.append(F.pad(own, (0, 0, columns - own.shape[1], 0)))
        return torch.stack(rows)

    return Cache([Columns(column(n, 0), column(n, 1)) for n in range(len(texts[0].layers))])


def as_argument(kept: Cache, model: nn.Module) -> dict[str, Cache]:
    """A cache as an argument of ``model(...)``, which adds to it what it reads.

    transformers 5.24 calls it ``cache`` and older ones ``past_key_values``, as a model's own code
    may go on to do.
    """
    return {_name(type(model).forward): kept}


@cache
def _name(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
