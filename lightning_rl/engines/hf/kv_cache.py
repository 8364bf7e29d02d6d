"""KV caches, or states, of the rows that are decoded together."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from lightning_rl.engines.prefix_cache import CachedPrefix
from lightning_rl.errors import ConfigError

LEAST_ROOM = 32
"""Spare columns of a cache; whenever they run out, the whole cache is copied."""


class Columns(DynamicLayer):
    """One layer's keys and values (N, H, T, D) of N rows whose last token is the last column.

    Shorter rows begin in later columns. Memory is laid out by column, (T, N, H, D), with spare room
    at the end, so that a new column is written in one piece, whereas concatenation would copy
    everything each time.
    """

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "Columns":
        """Return a layer that holds these keys and values."""
        made = cls()
        made.update(keys, values)
        return made

    def _hold(self, parts: list[Tensor], width: int) -> None:
        """Hold keys and values by column, of which ``width`` are in use."""
        self._parts = parts
        self.keys, self.values = (part[:width].permute(1, 2, 0, 3) for part in parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            parts = [_by_column(part) for part in (key_states, value_states)]
            self._hold(parts, key_states.shape[-2])
            return self.keys, self.values
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
        """Keep only these rows (n,), from column ``first`` on."""
        width = self.get_seq_length()
        self._hold([part[first:width, rows] for part in self._parts], width - first)

    def join(self, others: "Columns", rows: Tensor) -> None:
        """Add the ``rows`` (n,) of another layer."""
        old, new = self.get_seq_length(), others.get_seq_length()
        width = max(old, new)
        parts = [
            torch.cat([_aligned(mine[:old], width), _aligned(_by_column(theirs[rows]), width)], 1)
            for mine, theirs in zip(self._parts, (others.keys, others.values), strict=True)
        ]
        self._hold(parts, width)


class States(LinearAttentionLayer):
    """A layer's states of N rows instead of keys and values: one state per row of any length."""

    def keep(self, rows: Tensor, first: int) -> None:
        """Keep only these rows (n,)."""
        self.reorder_cache(rows)

    def join(self, others: LinearAttentionLayer, rows: Tensor) -> None:
        """Add the ``rows`` (n,) of another layer."""
        for mine, theirs in (
            (self.conv_states, others.conv_states),
            (self.recurrent_states, others.recurrent_states),
        ):
            for number, state in theirs.items():
                if state is not None:
                    mine[number] = torch.cat([mine[number], state[rows]])


class ColumnsAndStates(Columns, LinearAttentionAndFullAttentionLayer):
    """The cache of a layer with both attention and states."""

    def keep(self, rows: Tensor, first: int) -> None:
        super().keep(rows, first)
        LinearAttentionLayer.reorder_cache(self, rows)

    def join(self, others: "ColumnsAndStates", rows: Tensor) -> None:
        super().join(others, rows)
        States.join(self, others, rows)


def empty_cache(config: PretrainedConfig) -> Cache:
    """Return an empty cache for a model's layers.

    Sliding windows are not handled here, but by masks.
    """
    known = DynamicCache(config=config).layers
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in known):
        return Cache(layer_class_to_replicate=Columns)  # for layers share keys in some models
    return Cache([_layer_like(layer) for layer in known])


def require_cache(lm: PreTrainedModel, kept_tokens: int) -> None:
    """Reject a model whose rows cannot be split and joined.

    Raises:
        ConfigError: if it keeps states outside a cache; or in one, while texts are to be kept.
    """
    carries = any(
        isinstance(layer, LinearAttentionLayer) for layer in empty_cache(lm.config).layers
    )
    if getattr(lm, "_is_stateful", False) and not carries:
        raise ConfigError(
            f"{type(lm).__name__} stores its state in itself, so TransformersEngine cannot add and "
            "remove rows while it generates; use VLLMLocal"
        )
    if kept_tokens and carries:
        raise ConfigError(
            f"engine kept_tokens={kept_tokens}: {type(lm).__name__} is recurrent, and its states "
            "are not kept for texts; set kept_tokens: 0"
        )


def attends(known: Cache) -> bool:
    """Return True if any layer attends to columns, and so needs a mask of each row's columns."""
    return any(isinstance(layer, Columns) for layer in known.layers)


def _layer_like(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> Any:
    attends = isinstance(layer, DynamicLayer)
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return Columns()
    kind = ColumnsAndStates if attends else States
    return kind(number_of_states=layer.number_of_states)


def _by_column(part: Tensor) -> Tensor:
    """Permute (N, H, T, D) to (T, N, H, D)."""
    return part.permute(2, 0, 1, 3)


def _aligned(part: Tensor, width: int) -> Tensor:
    """Pad columns (T, N, H, D) in front to ``width``."""
    return F.pad(part, (0, 0, 0, 0, 0, 0, width - len(part), 0))


def _with_room(part: Tensor, columns: int) -> Tensor:
    """Return a copy with ``columns`` columns; those beyond its own are uninitialised."""
    wider = part.new_empty(columns, *part.shape[1:])
    wider[: len(part)] = part
    return wider


def begun_cache(
    kept: Sequence[CachedPrefix | None], starts: Tensor, columns: int, config: PretrainedConfig
) -> Cache:
    """Return a cache of ``columns`` columns for N rows that begin in ``starts`` (N,), from kept
    texts.
    """
    if columns <= 0:
        return empty_cache(config)
    counts = [columns - start for start in starts.tolist()]
    texts = [text for text in kept if text is not None]  # all of them, if there are columns

    def column(layer: int, part: int) -> Tensor:
        rows = []
        for text, count in zip(texts, counts, strict=True):
            own = text.layers[layer][part][:, : max(count, 0)]
            rows.append(F.pad(own, (0, 0, columns - own.shape[1], 0)))
        return torch.stack(rows)

    return Cache([Columns.of(column(n, 0), column(n, 1)) for n in range(len(texts[0].layers))])


def as_argument(kept: Cache, model: nn.Module) -> dict[str, Cache]:
    """Return a cache as a keyword argument of ``model(...)``, which adds what it reads to it.

    transformers 5.24 names it ``cache``, older versions and some models' own code
    ``past_key_values``; models without attention name it ``cache_params``.
    """
    return {_name(type(model).forward): kept}


@cache
def _name(forward: Callable[..., Any]) -> str:
    names = inspect.signature(forward).parameters
    return next((one for one in ("cache", "cache_params") if one in names), "past_key_values")
