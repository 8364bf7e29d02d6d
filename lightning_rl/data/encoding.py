"""Turns prompts into tokens: texts as they are, chats by the tokenizer's chat template."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from os.path import commonprefix
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.data.chats import NO_TEMPLATE, begun_in, render, row_options, tool_names
from lightning_rl.errors import DataError
from lightning_rl.rollout import Message, Picture
from lightning_rl.vision.reader import begin_fault, begun_once, encode

_BATCH = 1000
"""Number of prompts that are measured at a time."""
_PROBED = 2000
"""Characters of a first row that are encoded and decoded again."""
Row = Mapping[str, Any]


class Encoded(NamedTuple):
    """A prompt's tokens, where its pictures begin among them, and the turn that it has begun."""

    token_ids: list[int]
    places: list[int]
    begun: str


class PromptEncoder:
    """Encodes prompts with one tokenizer.

    Args:
        tokenizer: encodes texts; its chat template renders chats, with the generation prompt.
        chat_options: further variables of the chat template, such as ``tools``; a row's come first.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_options = dict(chat_options or {})
        self._told: set[str] = set()

    @property
    def key(self) -> str | None:
        """A digest of all that turns prompts into tokens; None if the tokenizer hides it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        variables = getattr(self.tokenizer.apply_chat_template, "keywords", {})
        # Templates write special tokens by their roles, which the backend does not know.
        told = [self.tokenizer.special_tokens_map, self.tokenizer.chat_template, variables]
        identity = [backend.to_str(), *told, self.chat_options]
        return hashlib.blake2b(
            json.dumps(identity, sort_keys=True, default=repr).encode()
        ).hexdigest()

    def encode(
        self,
        prompt: str | list[Message],
        pictures: Sequence[Picture],
        where: Callable[[], str],
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> Encoded:
        """Return a prompt's tokens.

        ``where`` tells the prompt's location for errors; to find that, a file may have to be read.
        ``columns`` are the row's others, of which some reach the chat template
        (:func:`~lightning_rl.data.chats.row_options`).

        Raises:
            DataError: naming the location, if the prompt has no tokens, or the chat template cannot
                render it.
        """
        if isinstance(prompt, str):
            text, begun = prompt, ""
        else:
            text = self.rendered(prompt, columns, where)
            begun = begun_in(text, prompt)
        token_ids, places = encode(self.tokenizer, text, pictures, special=isinstance(prompt, str))
        if not token_ids:
            raise DataError(f"{where()}: the prompt {prompt!r:.80} has no tokens")
        if fault := begin_fault(self.tokenizer, token_ids):
            self._tell("begin", f"{where()}: the prompt {fault}")
        return Encoded(token_ids, places, begun)

    def lengths(
        self, rows: Iterable[tuple[str | list[Message], Row]], where: Callable[[], str]
    ) -> np.ndarray:
        """Return the number of tokens of each prompt without its pictures, shape (prompts,).

        A row is its prompt and its columns.
        """
        rows = iter(rows)
        lengths: list[np.ndarray] = []
        while batch := list(islice(rows, _BATCH)):
            counts = np.zeros(len(batch), dtype=np.uint32)
            for chat in (False, True):
                some = [i for i, (prompt, _) in enumerate(batch) if isinstance(prompt, str) != chat]
                if some:
                    counts[some] = self._counted([batch[place] for place in some], chat, where)
            lengths.append(counts)
        return np.concatenate(lengths)

    def _counted(self, rows: list[Any], chat: bool, where: Callable[[], str]) -> list[int]:
        """Return the number of tokens of each prompt; all are chats, or none is."""
        texts = [self.rendered(p, row, where) if chat else p for p, row in rows]
        found = self.tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)
        listed = found["input_ids"]
        listed = listed if chat else [begun_once(self.tokenizer, ids) for ids in listed]
        return [len(token_ids) for token_ids in listed]

    def rendered(
        self, chat: list[Message], columns: Mapping[str, Any], where: Callable[[], str]
    ) -> str:
        """Return a row's chat as text, up to where the model goes on.

        Raises:
            DataError: if there is no chat template, it cannot render the chat, or the columns for
                it are malformed.
        """
        options = self._options(columns, where)
        try:
            return render(self.tokenizer, chat, self.chat_options | options)
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{where()}: the chat template cannot render the prompt: {error}; correct its "
                "messages, or use a model whose template supports them"
            ) from error

    def check(
        self, prompt: str | list[Message], columns: Mapping[str, Any], where: Callable[[], str]
    ) -> None:
        """Check a first row before an engine starts, and warn if its text is not given back.

        Raises:
            DataError: if it needs a chat template and there is none, or its columns for the
                template are malformed.
        """
        if isinstance(prompt, str):
            text = prompt
        else:
            self._options(columns, where)
            texts = (m["content"] for m in prompt if isinstance(m["content"], str))
            text = max(texts, key=len, default="")
        text = text[:_PROBED]
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        back = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if back != text:
            place = max(0, len(commonprefix([text, back])) - 20)  # noqa: RUF071  of texts
            self._tell(
                "text",
                f"{where()}: the tokenizer does not give back the text that it encodes: "
                f"{text[place : place + 60]!r} becomes {back[place : place + 60]!r}; so rewards "
                "would read completions, too. Perhaps tokenizer_class in tokenizer_config.json "
                "does not fit tokenizer.json",
            )

    def _options(self, columns: Mapping[str, Any], where: Callable[[], str]) -> dict[str, Any]:
        """Return what a row tells the chat template, and name what it tells in vain."""
        if self.tokenizer.chat_template is None:
            raise DataError(f"{where()}: the prompt is a chat, but {NO_TEMPLATE}")
        try:
            options = row_options(columns)
        except ValueError as error:
            raise DataError(f"{where()}: {error}") from error
        variables = getattr(self.tokenizer.apply_chat_template, "keywords", {})
        template = str(variables.get("chat_template", self.tokenizer.chat_template))
        for name, value in options.items():
            if name not in template and name != "chat_template" and value is not None:
                column = name if name == "tools" else f"chat_template_kwargs.{name}"
                self._tell(name, f"{where()}: the chat template never reads {column}")
        known = tool_names(self.chat_options.get("tools") or ())
        for name in tool_names(options.get("tools") or ()):
            if known and name not in known:
                raise DataError(
                    f"{where()}: column 'tools' names {name!r}, which the agent does not have; it "
                    f"has {', '.join(known)}: add the tool to the agent, or rename the column "
                    "(columns: {other_name: tools})"
                )
        return options

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            rank_zero_warn(f"{text}; further rows are not reported")
