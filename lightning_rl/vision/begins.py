"""Beginnings: a text has its beginning-of-sequence token once, as the model was trained with it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def begun_once(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[int]:
    """Tokens with one beginning-of-sequence token: a text may hold what the tokenizer adds."""
    begin = 0
    while token_ids[begin : begin + 2] == [tokenizer.bos_token_id] * 2:
        begin += 1
    return token_ids[begin:]


def begin_fault(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str | None:
    """What is wrong if a prompt has no beginning-of-sequence token, or several; None: nothing is.

    A tokenizer that puts none before a text is of a model that needs none.
    """
    begin, token = tokenizer.bos_token_id, tokenizer.bos_token
    if begin is None or tokenizer("")["input_ids"][:1] != [begin]:
        return None
    count = token_ids.count(begin)
    if count == 0:
        return (
            f"does not begin with {token!r}, which the tokenizer puts before other texts; write "
            "{{ bos_token }} at the start of tokenizer.chat_template if the model was trained with "
            "it"
        )
    if count == 1 or begin == tokenizer.eos_token_id:
        return None
    return (
        f"holds {token!r} {count} times; remove it from the messages, or give the rendered text as "
        "the prompt"
    )
