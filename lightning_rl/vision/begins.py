"""Beginnings: a text has its beginning-of-sequence token exactly once, as in training."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def begun_once(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[int]:
    """Remove repeated beginning-of-sequence tokens: a text may hold the one the tokenizer adds."""
    begin = 0
    while token_ids[begin : begin + 2] == [tokenizer.bos_token_id] * 2:
        begin += 1
    return token_ids[begin:]


def begin_fault(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str | None:
    """Describe the fault if a prompt has no beginning-of-sequence token, or several; else None.

    If the tokenizer does not put one before texts, the model needs none.
    """
    begin, token = tokenizer.bos_token_id, tokenizer.bos_token
    if begin is None or tokenizer("")["input_ids"][:1] != [begin]:
        return None
    count = token_ids.count(begin)
    if count == 0:
        return (
            f"does not begin with {token!r}, which the tokenizer puts before other texts; if the "
            "model was trained with it, write {{ bos_token }} at the start of "
            "tokenizer.chat_template"
        )
    if count == 1 or begin == tokenizer.eos_token_id:
        return None
    return (
        f"holds {token!r} {count} times; remove it from the messages, or give the rendered text as "
        "the prompt"
    )
