"""KV cache of finished texts, for requests that continue them."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.rollout import Placed

_BASE = np.uint64(6364136223846793005)


@dataclass(frozen=True, slots=True)
class TextHash:
    """The hash of a text: the sum of (token + 1) * BASE**place, modulo 2**64.

    ``power`` belongs to the next place, so that a continued text is hashed without reading it
    again. Equal texts have equal hashes; different ones may collide, so compare any match.
    """

    length: int = 0
    hash: int = 0
    power: int = 1

    def hashes(self, token_ids: Sequence[int]) -> list[int]:
        """Return the hash after each of these further tokens."""
        sums: list[int] = self._read(token_ids)[0].tolist()
        return sums

    def then(self, token_ids: Sequence[int]) -> "TextHash":
        """Return the hash of the text extended by these tokens."""
        if not token_ids:
            return self
        sums, powers = self._read(token_ids)
        return TextHash(self.length + len(token_ids), int(sums[-1]), int(powers[-1]))

    def _read(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return, after each token, the hash and the next power."""
        tokens = np.frombuffer(array("q", token_ids), np.uint64)
        powers = np.multiply.accumulate(np.r_[np.uint64(self.power), np.full(len(tokens), _BASE)])
        sums = np.cumsum((tokens + np.uint64(1)) * powers[:-1]) + np.uint64(self.hash)
        return sums, powers[1:]


_Key = tuple[Engine, int, int, int, tuple[Placed, ...]]
"""A text's writer, the version of its weights, and the text's length, hash and pictures."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A text of T tokens and, for each layer, their keys and values (H, T, D)."""

    token_ids: list[int]
    layers: list[tuple[Tensor, Tensor]]


class PrefixCache:
    """The most recently used texts, up to ``most`` tokens in total.

    Whatever changes weights must call :meth:`clear`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[_Key, CachedPrefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.tokens = 0

    def keep(
        self,
        writer: Engine,
        token_ids: list[int],
        layers: list[tuple[Tensor, Tensor]],
        pictures: tuple[Placed, ...] = (),
    ) -> None:
        """Keep a text, and drop the oldest ones if there are too many tokens."""
        text = TextHash().then(token_ids)
        key = writer, writer.version, text.length, text.hash, pictures
        if key in self._kept or text.length > self.most:
            return
        self._kept[key] = CachedPrefix(token_ids, layers)
        self._lengths[text.length] += 1
        self.tokens += text.length
        while self.tokens > self.most:
            self._drop(next(iter(self._kept)))

    def longest(
        self, writer: Engine, token_ids: Sequence[int], pictures: tuple[Placed, ...] = ()
    ) -> CachedPrefix | None:
        """Return the longest kept text that this one continues by a token or more; else None.

        It becomes the first to be dropped, because its continuation will replace it.
        """
        if not self._kept:
            return None
        hashes = TextHash().hashes(token_ids)
        for length in sorted(self._lengths, reverse=True):
            if length < len(token_ids):
                shown = tuple(one for one in pictures if one.start < length)
                key = writer, writer.version, length, hashes[length - 1], shown
                kept = self._kept.get(key)
                if kept is not None and kept.token_ids == token_ids[:length]:
                    self._kept.move_to_end(key, last=False)
                    return kept
        return None

    def clear(self) -> None:
        """Drop all texts."""
        self._kept.clear()
        self._lengths.clear()
        self.tokens = 0

    def _drop(self, key: _Key) -> None:
        length = len(self._kept.pop(key).token_ids)
        self.tokens -= length
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
