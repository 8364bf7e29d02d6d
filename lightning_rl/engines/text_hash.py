"""Hashes of token texts, and of all their prefixes in one pass."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
