"""The text that each token of a rollout stands for."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

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


Marks = Sequence[tuple[int, str]]
"""Where pictures begin among a row's tokens, prompt included, and what is shown of each."""


def mark_of(width: Any, height: Any) -> str:
    """What stands in a text for a picture."""
    return f"[image {width}×{height}]"


def marks_of(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Of a row's record; a damaged one is to be seen, too."""
    pictures = row.get("pictures") or ()
    return [
        (at, mark_of(one.get("width"), one.get("height")))
        for at, one in zip(row.get("places") or (), pictures, strict=False)
    ]


def with_marks(
    pieces: Sequence[str], token_ids: Sequence[int], marks: Marks, begin: int = 0
) -> list[str]:
    """Pieces in which a picture is one mark, as a character of several tokens is one piece.

    Args:
        pieces: a text per token.
        token_ids: of the same length.
        marks: of the row.
        begin: the place of the first of these tokens in the row.
    """
    shown, end = list(pieces), begin + len(token_ids)
    for (start, mark), (following, _) in pairwise([*marks, (end, "")]):
        if begin <= start < end:
            at = start - begin
            stop = end_of_run(token_ids, at, following - begin)
            shown[at:stop] = [mark] + [""] * (stop - at - 1)
    return shown


def pieces_of(
    pieces: Callable[[Sequence[int]], list[str]],
    row: Mapping[str, Any],
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
) -> dict[str, list[str]]:
    """The texts of a row's tokens, for its record: ``prompt_pieces`` and ``pieces``."""
    marks = marks_of(row)
    return {
        "prompt_pieces": with_marks(pieces(prompt_ids), prompt_ids, marks),
        "pieces": with_marks(pieces(token_ids), token_ids, marks, len(prompt_ids)),
    }


def text_with_marks(
    decode: Callable[[list[int]], str], token_ids: Sequence[int], marks: Marks, tail: int
) -> str:
    """The text of the last ``tail`` tokens, in which a picture is a mark; one is never cut."""
    begin = max(0, len(token_ids) - tail)
    parts, at = [], begin
    for (start, mark), (following, _) in pairwise([*marks, (len(token_ids), "")]):
        stop = end_of_run(token_ids, start, following)
        if at < stop:
            parts += [decode(list(token_ids[at:start])) if at < start else "", mark]
            at = stop
    parts.append(decode(list(token_ids[at:])) if at < len(token_ids) else "")
    return "".join(parts)


def end_of_run(token_ids: Sequence[int], start: int, most: int) -> int:
    """Where the placeholders that begin at ``start`` end."""
    stop = start
    while stop < min(most, len(token_ids)) and token_ids[stop] == token_ids[start]:
        stop += 1
    return stop
