"""Routing: the experts that each token of a text was sent to, as compact text in rollouts.

``2x8x1:...`` stands for 2 layers and 8 experts per token, in 1 byte each; the rest is base64 of
their numbers, token by token and layer by layer. An empty text means that nothing was recorded.
"""

import numpy as np
import torch
from torch import Tensor

from lightning_rl.data.packed_text import joined, split
from lightning_rl.errors import DataError

UNKNOWN = -1
"""Stands for an expert that the router is to choose."""


def to_text(experts: Tensor) -> str:
    """Encode the experts (T, L, K) of T tokens as text."""
    narrow = not experts.numel() or int(experts.max()) < 256
    form = f"{experts.shape[1]}x{experts.shape[2]}x{1 if narrow else 2}"
    return joined(form, experts.cpu().numpy().astype("<u1" if narrow else "<i2").tobytes())


def of_text(text: str) -> Tensor:
    """Decode experts (T, L, K) as int16; inverse of :func:`to_text`.

    Raises:
        DataError: if the text is not of this form.
    """
    form, data = _split(text)
    layers, top_k, width = _sizes(form)
    numbers = np.frombuffer(data, "<u1" if width == 1 else "<i2").astype(np.int16)
    return torch.from_numpy(numbers).view(len(data) // _stride(form), layers, top_k)


def beginning(text: str, tokens: int) -> str:
    """Return the experts of the first ``tokens`` tokens, or of as many as there are."""
    if not text:
        return text
    form, data = _split(text)
    return joined(form, data[: tokens * _stride(form)])


def extended(known: str, longer: str) -> str:
    """Extend the experts that are ``known`` by those of ``longer``, a repeated reading of the text.

    Known ones are kept: the logprobs of these tokens were computed with them.

    Raises:
        DataError: if they are of two models.
    """
    if not (known and longer):
        return known or longer
    (form, data), (other, more) = _split(known), _split(longer)
    if _sizes(form)[:2] != _sizes(other)[:2]:
        raise DataError(f"routed experts of two models in one row ({form}, {other}); drop them")
    if form != other:  # in one of them all numbers happen to be small
        return to_text(torch.cat([of_text(known), of_text(longer)[len(of_text(known)) :]]))
    return joined(form, data + more[len(data) :])


def column(texts: list[str], lengths: list[int]) -> Tensor | None:
    """Return experts (T, L, K) of rows of these lengths, concatenated; None if none are recorded.

    Raises:
        DataError: if rows are of several models.
    """
    rows = [of_text(text) if text else None for text in texts]
    shapes = {row.shape[1:] for row in rows if row is not None}
    if len(shapes) > 1:
        raise DataError(
            f"routed experts of several models in one batch: layers x experts {sorted(shapes)}; "
            "keep their rollouts apart"
        )
    if not shapes:
        return None
    made = torch.full((sum(lengths), *shapes.pop()), UNKNOWN, dtype=torch.int16, device="cpu")
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        if row is not None:
            made[begin : begin + min(length, len(row))] = row[:length]
        begin += length
    return made


def _split(text: str) -> tuple[str, bytes]:
    return split(text, "routed experts", _stride)


def _sizes(form: str) -> tuple[int, int, int]:
    layers, top_k, width = map(int, form.split("x"))
    return layers, top_k, width


def _stride(form: str) -> int:
    layers, top_k, width = _sizes(form)
    return layers * top_k * width if width in (1, 2) else 0
