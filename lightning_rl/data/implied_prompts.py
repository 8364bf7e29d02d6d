"""Prompts that rows imply: the beginning that their conversations have in common, as in TRL."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from lightning_rl.data.chats import as_chat, is_chat
from lightning_rl.data.supervised import TRAINED


@dataclass(frozen=True)
class ImpliedPrompts:
    """Finds the prompt of rows that have whole conversations for completions.

    - Two columns (``chosen``, ``rejected``): the prompt is the messages, or the text, with which
      both begin.
    - One column: it is all before the first turn of a trained role.
    - Columns that repeat the row's chat prompt are cut behind it.

    Args:
        columns: the columns with completions.
        messages: a column with a whole conversation, read where a row has no completion; None: no
            such column.
        trained_roles: roles whose turns are trained.
    """

    columns: tuple[str, ...]
    messages: str | None = None
    trained_roles: tuple[str, ...] = TRAINED

    def __call__(self, row: dict[str, Any], prompt_column: str) -> dict[str, Any]:
        """Return a row with a prompt, and what follows it in its columns; or the same row."""
        first = self.columns[0]
        if self.messages is not None and row.get(first) is None and is_chat(row.get(self.messages)):
            row = {**row, first: row[self.messages], prompt_column: None}
            del row[self.messages]
        values: list[Any] = [row.get(column) for column in self.columns]
        prompt = row.get(prompt_column)
        if all(map(is_chat, values)):
            chats = [as_chat(value) for value in values]
            if isinstance(prompt, list):
                prompt = as_chat(prompt)
                repeated = all(len(c) > len(prompt) and c[: len(prompt)] == prompt for c in chats)
                count = len(prompt) if repeated else 0
            elif count := self._shared(chats):
                prompt = chats[0][:count]
            values = [chat[count:] for chat in chats]
        elif prompt is None and len(values) > 1 and all(isinstance(v, str) for v in values):
            count = _shared_text(values)
            prompt = values[0][:count] or None
            values = [value[count:] for value in values]
        found = dict(zip(self.columns, values, strict=True))
        return row | {prompt_column: prompt} | found if prompt is not None else row

    def _shared(self, chats: Sequence[list[Any]]) -> int:
        """Return how many messages are the prompt; 0 if none can be."""
        first, *others = chats
        if not others:
            trained = (i for i, m in enumerate(first) if m["role"] in self.trained_roles and i)
            return 0 if first[0]["role"] == "assistant" else next(trained, 0)
        count = 0
        while count < min(map(len, chats)) - 1 and all(c[count] == first[count] for c in others):
            count += 1
        while count and first[count - 1]["role"] == "assistant":  # a turn that both go on from
            count -= 1
        return count


def _shared_text(texts: list[str]) -> int:
    """Return the length of the beginning that texts share, without a part of a word at its end."""
    shared = re.sub(r"\w+$", "", commonprefix(texts))  # noqa: RUF071  no paths
    return len(shared.rstrip(" "))
