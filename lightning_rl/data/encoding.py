"""Turns prompts into tokens: texts as they are, chats by the tokenizer's chat template."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.data.chats import render
from lightning_rl.errors import DataError
from lightning_rl.rollout import Message, Picture
from lightning_rl.vision.begins import begin_fault, begun_once
from lightning_rl.vision.reader import encode

_BATCH = 1000
"""Number of prompts that are measured at a time."""


class PromptEncoder:
    """Encodes prompts with one tokenizer.

    Args:
        tokenizer: encodes texts; its chat template renders chats, with the generation prompt.
        chat_options: further variables of the chat template, such as ``tools``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_options = dict(chat_options or {})
        self._begin_told = False

    @property
    def key(self) -> str | None:
        """A digest of all that turns prompts into tokens; None if the tokenizer hides it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        variables = getattr(self.tokenizer.apply_chat_template, "keywords", {})
        told = [backend.to_str(), self.tokenizer.chat_template, variables, self.chat_options]
        return hashlib.blake2b(json.dumps(told, sort_keys=True, default=repr).encode()).hexdigest()

    def encode(
        self,
        prompt: str | list[Message],
        pictures: Sequence[Picture],
        where: Callable[[], str],
    ) -> tuple[list[int], list[int]]:
        """Return token ids, and the indices at which pictures begin among them.

        ``where`` tells the prompt's location for errors; to find that, a file may have to be read.

        Raises:
            DataError: naming the location, if the prompt has no tokens, or the chat template cannot
                render it.
        """
        plain = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self._rendered([prompt], where)[0]
        token_ids, places = encode(self.tokenizer, text, pictures, special=plain)
        if not token_ids:
            raise DataError(f"{where()}: the prompt {prompt!r:.80} has no tokens")
        if not self._begin_told and (fault := begin_fault(self.tokenizer, token_ids)):
            self._begin_told = True
            rank_zero_warn(f"{where()}: the prompt {fault}; further rows are not reported")
        return token_ids, places

    def lengths(
        self, prompts: Iterable[str | list[Message]], where: Callable[[], str]
    ) -> np.ndarray:
        """Return the number of tokens of each prompt without its pictures, shape (prompts,)."""
        prompts = iter(prompts)
        lengths: list[np.ndarray] = []
        while batch := list(islice(prompts, _BATCH)):
            counts = np.zeros(len(batch), dtype=np.uint32)
            for chat in (False, True):
                places = [i for i, prompt in enumerate(batch) if isinstance(prompt, str) != chat]
                if places:
                    some = [batch[place] for place in places]
                    counts[places] = self._counted(some, chat, where)
            lengths.append(counts)
        return np.concatenate(lengths)

    def _counted(self, prompts: list[Any], chat: bool, where: Callable[[], str]) -> list[int]:
        """Return the number of tokens of each prompt; all are chats, or none is."""
        texts = self._rendered(prompts, where) if chat else prompts
        found = self.tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)
        listed = found["input_ids"]
        listed = listed if chat else [begun_once(self.tokenizer, ids) for ids in listed]
        return [len(token_ids) for token_ids in listed]

    def _rendered(self, chats: list[list[Message]], where: Callable[[], str]) -> list[str]:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"{where()}: the prompt is a chat, but the tokenizer has no chat template; use "
                "plain text prompts, or set tokenizer.chat_template and save the tokenizer"
            )
        try:
            return render(self.tokenizer, chats, self.chat_options)
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{where()}: the chat template cannot render the prompt: {error}; correct its "
                "messages, or use a model whose template supports them"
            ) from error
