"""TeacherLogprobs: what a teacher thinks of each token of a text, as compact text in rollouts.

``16:...`` stands for the 16 likeliest tokens beside each written one; the rest is base64 of, token
by token, the written token's logprob, those 16 tokens, and their logprobs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.data.packed_text import joined, split
from lightning_rl.errors import DataError

UNKNOWN = -1
"""Stands for a token among the likeliest where no teacher has looked."""


class TeacherLogprobs(NamedTuple):
    """A teacher's distribution over each of n tokens, as far as it is known.

    ``logprobs`` (n,) are those of the written tokens, NaN where it has not looked; ``ids`` (n, K)
    are the K likeliest tokens, -1 where it has not looked, and ``top_logprobs`` (n, K) theirs.
    """

    logprobs: Tensor
    ids: Tensor
    top_logprobs: Tensor


def to_text(found: TeacherLogprobs) -> str:
    """Encode logprobs, which may be on any device, as text."""
    count = found.ids.shape[1]
    made = np.zeros(len(found.logprobs), _form(count))
    for name, column in zip(made.dtype.names or (), found, strict=True):
        made[name] = column.cpu().numpy()
    return joined(str(count), made.tobytes())


def of_text(text: str) -> TeacherLogprobs:
    """Decode a text; inverse of :func:`to_text`.

    Raises:
        DataError: if the text is not of this form.
    """
    count, data = split(text, "a teacher's logprobs", lambda form: _form(int(form)).itemsize)
    found = np.frombuffer(data, _form(int(count)))
    logprobs, ids, top = (torch.from_numpy(found[n].copy()) for n in found.dtype.names or ())
    return TeacherLogprobs(logprobs, ids.long(), top)


def columns(
    texts: Sequence[str], prompts: Sequence[int], lengths: Sequence[int]
) -> dict[str, Tensor]:
    """Return columns of the tokens (T,) of rows; {} if no teacher has looked at any.

    Args:
        texts: those of the rows, each of the tokens after the row's prompt; "": there is none.
        prompts: the number of tokens of each row's prompt.
        lengths: the number of tokens of each row, its prompt included.

    Raises:
        DataError: if a text belongs to another number of tokens.
    """
    if not any(texts):
        return {}
    rows = [of_text(text) if text else None for text in texts]
    total, count = sum(lengths), max(row.ids.shape[1] for row in rows if row is not None)
    logprobs = torch.full((total,), torch.nan, device="cpu")
    ids = torch.full((total, count), UNKNOWN, device="cpu")
    top = torch.full((total, count), -torch.inf, device="cpu")
    begin = 0
    for row, prompt, length in zip(rows, prompts, lengths, strict=True):
        if row is not None:
            if len(row.logprobs) != length - prompt:
                raise DataError(
                    f"a teacher's logprobs of {len(row.logprobs)} tokens are in a row of "
                    f"{length - prompt}; restore the file"
                )
            within, known = slice(begin + prompt, begin + length), row.ids.shape[1]
            logprobs[within] = row.logprobs
            ids[within, :known], top[within, :known] = row.ids, row.top_logprobs
        begin += length
    made = {"teacher_logprobs": logprobs}
    return made | ({"teacher_ids": ids, "teacher_top": top} if count else {})


def _form(count: int) -> np.dtype:
    return np.dtype([("own", "<f4"), ("ids", "<i4", (count,)), ("top", "<f4", (count,))])
