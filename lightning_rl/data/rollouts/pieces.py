"""The text that each token of a rollout stands for."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""The mark of decoders for bytes that are not (yet) a character."""


class TokenPieces:
    """Cuts decoded text into one piece per token; each token's piece is decoded once.

    Joined, the pieces are the whole text (a decoder that strips the first space of a text keeps it
    here). The tokens of one character have all of it in the first piece, and empty ones after.

    Args:
        decode: token ids to text, special tokens included.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        pieces = [self._piece(token) for token in token_ids]
        start = 0
        while start < len(pieces):
            start += self._join(pieces, token_ids, start) if UNFINISHED in pieces[start] else 1
        return pieces

    def _piece(self, token: int) -> str:
        if token not in self._known:
            # Twice: decoders treat the first token of a text differently (SentencePiece strips
            # its space).
            once = self._decode([token])
            self._known[token] = self._decode([token, token])[len(once) :]
        return self._known[token]

    def _join(self, pieces: list[str], token_ids: Sequence[int], start: int) -> int:
        """Put characters that several tokens make into the first; returns how many were used."""
        end = start + 1
        while end < len(pieces) and UNFINISHED in pieces[end]:
            end += 1
            text = self._decode(list(token_ids[start:end]))
            if UNFINISHED not in text:
                pieces[start:end] = [text] + [""] * (end - start - 1)
                return end - start
        return end - start
