"""The text of each token of a rollout."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

UNFINISHED = "\ufffd"
"""The character that decoders write for bytes that are not (yet) a character."""


class TokenPieces:
    """Cuts decoded text into one piece per token; each token's piece is decoded once.

    Joined, the pieces are the whole text (a decoder that strips the first space of a text keeps it
    here). If several tokens make one character, the first has it as its piece, and the others are
    empty.

    Args:
        decode: maps token ids to text, including special tokens.
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
        """Put a character made by several tokens into the first's piece; return how many there
        were.
        """
        end = start + 1
        while end < len(pieces) and UNFINISHED in pieces[end]:
            end += 1
            text = self._decode(list(token_ids[start:end]))
            if UNFINISHED not in text:
                pieces[start:end] = [text] + [""] * (end - start - 1)
                return end - start
        return end - start


Marks = Sequence[tuple[int, str]]
"""The indices at which pictures begin in a row, prompt included, each with its text."""


def mark_of(width: Any, height: Any) -> str:
    """Return the text that stands for a picture."""
    return f"[image {width}×{height}]"


def marks_of(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the marks of a row's record, even of a damaged one, so that it can be viewed."""
    pictures = row.get("pictures") or ()
    return [
        (at, mark_of(one.get("width"), one.get("height")))
        for at, one in zip(row.get("places") or (), pictures, strict=False)
    ]


def with_marks(
    pieces: Sequence[str], token_ids: Sequence[int], marks: Marks, begin: int = 0
) -> list[str]:
    """Return pieces in which each picture is one mark, like a character of several tokens.

    Args:
        pieces: one text per token.
        token_ids: the tokens, as many as pieces.
        marks: the row's marks.
        begin: the index of the first of these tokens in the row.
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
    """Return the texts of a row's tokens, for its record: ``prompt_pieces`` and ``pieces``."""
    marks = marks_of(row)
    return {
        "prompt_pieces": with_marks(pieces(prompt_ids), prompt_ids, marks),
        "pieces": with_marks(pieces(token_ids), token_ids, marks, len(prompt_ids)),
    }


def text_with_marks(
    decode: Callable[[list[int]], str], token_ids: Sequence[int], marks: Marks, tail: int
) -> str:
    """Return the text of the last ``tail`` tokens, with a mark per picture; none is cut."""
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
    """Return the index at which the placeholders that begin at ``start`` end."""
    stop = start
    while stop < min(most, len(token_ids)) and token_ids[stop] == token_ids[start]:
        stop += 1
    return stop
