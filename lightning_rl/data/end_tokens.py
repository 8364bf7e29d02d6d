"""EndTokens: the tokens that end a turn, used by engines, masks, agents, data and exports alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message

MARK = "\ue000"
"""A private-use character: no template writes or trims it, and JSON keeps it as it is."""
QUESTION: Message = {"role": "user", "content": "Question?"}


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end a turn.

    Args:
        token_ids: all of them, ascending: the tokenizer's ``eos_token``, those named by the files
            of its model, and ``turn``.
        text: the token that ends a text without roles, the ``eos_token``.
        turn: the token with which the chat template closes a turn of the model.
    """

    token_ids: tuple[int, ...]
    text: int
    turn: int

    def ended(self, wrote: Sequence[int]) -> bool:
        """Return True if what the model wrote ends with one of them."""
        return bool(wrote) and wrote[-1] in self.token_ids

    def cut(self, wrote: Sequence[int]) -> list[int]:
        """Remove the end from what the model wrote, since a tokenizer may take it for ordinary
        text.
        """
        return list(wrote[:-1] if self.ended(wrote) else wrote)


def find_end_tokens(tokenizer: PreTrainedTokenizerBase, of_model: Iterable[int] = ()) -> EndTokens:
    """Return the ends of a tokenizer and of its model.

    Raises:
        ConfigError: if there are none.
    """
    text, turn = tokenizer.eos_token_id, _closing(tokenizer)
    found = sorted({*of_model, *(end for end in (text, turn) if end is not None)})
    if not found:
        raise ConfigError(
            f"the tokenizer of model={tokenizer.name_or_path!r} has no eos_token, so no completion "
            "could end; set one and save it again"
        )
    text = found[0] if text is None else text
    return EndTokens(tuple(found), text, text if turn is None else turn)


def end_tokens_of(tokenizer: PreTrainedTokenizerBase) -> EndTokens:
    """Return the ends that ``load_tokenizer`` found, or else those that the tokenizer knows.

    Raises:
        ConfigError: if there are none.
    """
    known: EndTokens | None = getattr(tokenizer, "ends", None)
    return find_end_tokens(tokenizer) if known is None else known


def _closing(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that the chat template writes right after the model's last turn, if any."""
    if tokenizer.chat_template is None:
        return None
    chat = [QUESTION, {"role": "assistant", "content": MARK}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template may refuse this chat, and may raise anything
        return None
    _, mark, after = text.rpartition(MARK)
    after = after.lstrip()
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    closing = [token for token in added if mark and token.strip() and after.startswith(token)]
    return added[max(closing, key=len)] if closing else None
