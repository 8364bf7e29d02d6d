"""Rows to imitate: a completion, or the trained turns of a conversation, as a rollout."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.data.chats import as_chat, is_chat, render, row_options
from lightning_rl.data.end_tokens import MARK, end_tokens_of
from lightning_rl.errors import ConfigError, DataError, require_at_least
from lightning_rl.rollout import Message, Prompt, Rollout, RolloutStatus, Row
from lightning_rl.vision.reader import encode

TRAINED = ("assistant",)
"""Roles whose turns are trained by default."""


def supervised_rollout(
    prompt: Prompt,
    completion_column: str,
    tokenizer: PreTrainedTokenizerBase,
    trained_roles: Sequence[str] = TRAINED,
) -> Rollout:
    """Return a given completion as a rollout that the policy is to imitate.

    A string is tokenised and followed by an end token: after a chat, the one with which the chat
    template closes a turn. A list of token ids is taken unchanged. Messages follow those of the
    prompt, and the chat template renders all as a whole; trained are the turns of
    ``trained_roles``, with the end token, except those with ``"weight": 0``, as OpenAI writes it.

    Raises:
        DataError: if the row has no completion, or none of its turns is trained.
    """
    given: Any = prompt.columns.get(completion_column)
    ends = end_tokens_of(tokenizer)
    row = Row.of(prompt)
    completion: str | list[Message]
    if isinstance(given, str):
        token_ids = tokenizer(given, add_special_tokens=False)["input_ids"]
        end = ends.text if isinstance(prompt.prompt, str) else ends.turn
        _append(row, [*token_ids, end])
        completion = prompt.begun + given
    elif isinstance(given, list) and given and all(isinstance(t, int) for t in given):
        _append(row, given)
        completion = prompt.begun + str(tokenizer.decode(given))
    elif is_chat(given) and not isinstance(prompt.prompt, str):
        messages = conversation(prompt, given)
        row = _turns(prompt, messages, tokenizer, trained_roles)
        completion = messages[len(prompt.prompt) :]
    else:
        raise not_completed(prompt, completion_column, given)
    return Rollout(
        prompt=prompt,
        group_id=prompt.id,
        sample_index=0,
        seed=0,
        rows=[row],
        completion=completion,
        status=RolloutStatus.COMPLETED,
        finish_reason="stop",
        reward=0.0,
        demonstration=True,
    )


def not_completed(prompt: Prompt, column: str, given: Any) -> DataError:
    """Return the error of a row without a completion that can be read."""
    if is_chat(given):
        return DataError(
            f"row {prompt.id}: {column!r} holds messages, but its prompt is a text; set chat: true "
            "to make that the user's message"
        )
    return DataError(
        f"row {prompt.id}: {column!r} must be a string, a list of token ids or, after a chat, "
        f"messages, got {given!r:.80}; name the column that holds the completion"
    )


def conversation(prompt: Prompt, said: str | Sequence[Message]) -> list[Message]:
    """Return a prompt's chat with what follows; a turn that the prompt has begun is continued.

    Raises:
        DataError: if another turn follows one that is begun.
    """
    assert not isinstance(prompt.prompt, str)
    follows = [{"role": "assistant", "content": said}] if isinstance(said, str) else as_chat(said)
    if prompt.begun:
        first = follows[0]
        if first["role"] != "assistant" or not isinstance(first["content"], str):
            raise DataError(
                f"row {prompt.id}: the prompt ends in a turn of the assistant, so the completion "
                f"must begin with its rest, not with {first!r:.80}"
            )
        follows = [{**first, "content": prompt.begun + first["content"]}, *follows[1:]]
    return [*prompt.prompt, *follows]


def _append(row: Row, token_ids: list[int]) -> None:
    row.append_written(token_ids, [0.0] * len(token_ids), [-1] * len(token_ids))


def _turns(
    prompt: Prompt, chat: list[Message], tokenizer: PreTrainedTokenizerBase, roles: Sequence[str]
) -> Row:
    """Return the row of a conversation; it ends with its last trained turn.

    Its text is cut where a turn begins and where it ends, and each piece is encoded by itself, as
    it is where the model writes a turn and an agent what follows.
    """
    options = row_options(prompt.columns)
    try:
        whole = render(tokenizer, chat, options, closed=True)
        opened = render(tokenizer, prompt.asked, options)
        spans = list(_spans(chat, len(prompt.prompt), whole, tokenizer, roles, options))
    except DataError as error:
        raise DataError(f"row {prompt.id}: {error}") from error
    except Exception as error:  # a template may raise anything
        raise DataError(
            f"row {prompt.id}: the chat template cannot render its conversation: {error}; correct "
            "its messages, or use a model whose template supports them"
        ) from error
    if not spans:
        told = ", ".join(message["role"] for message in chat[len(prompt.prompt) :])
        raise DataError(
            f"row {prompt.id}: none of its turns ({told}) is trained; trained_roles are "
            f"{', '.join(roles)}"
        )
    begin = spans[0][0]
    row = Row.of(prompt)
    if whole.startswith(opened) and len(opened) <= begin:
        begin = len(opened)
    else:  # an earlier turn looks different from one that is being written
        text = whole[:begin]
        row.prompt_ids, row.places = encode(tokenizer, text, prompt.pictures, special=False)
    for start, stop in spans:
        if start > begin:
            row.append_given(tokenizer(whole[begin:start], add_special_tokens=False)["input_ids"])
        _append(row, tokenizer(whole[start:stop], add_special_tokens=False)["input_ids"])
        begin = stop
    return row


def _spans(
    chat: list[Message],
    first: int,
    whole: str,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[str],
    options: dict[str, Any],
) -> Iterator[tuple[int, int]]:
    """Yield where each trained turn begins and ends in the text of a chat.

    A turn begins after its opening as the model is given it, or else with its content; it ends with
    its end token.

    Raises:
        DataError: if the template writes no end token behind a turn, or not its content.
    """
    ends = list(map(str, tokenizer.convert_ids_to_tokens([*end_tokens_of(tokenizer).token_ids])))
    for turn in range(first, len(chat)):
        message = chat[turn]
        if message["role"] not in roles or message.get("weight") == 0:
            continue
        start = _opening(chat, turn, whole, tokenizer, options)
        found = [(whole.find(end, start), end) for end in ends if whole.find(end, start) >= 0]
        if not found:
            raise DataError(
                f"the chat template closes turn {turn + 1} ({message['role']}) by none of the end "
                f"tokens {', '.join(ends)}, so the model would never learn to end it; set "
                "tokenizer.eos_token to the token that ends a turn, and save the tokenizer"
            )
        stop, end = min(found)
        yield start, stop + len(end)


def _opening(
    chat: list[Message],
    place: int,
    whole: str,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> int:
    if chat[place]["role"] == "assistant" and chat[place - 1]["role"] != "assistant":
        opened = render(tokenizer, chat[:place], options)
        if whole.startswith(opened):
            return len(opened)
    content = chat[place].get("content") or ""
    if not isinstance(content, str):
        raise DataError(
            f"turn {place + 1} has content parts, of which it cannot be told where "
            "they begin; write its content as a string"
        )
    marked = {**chat[place], "content": MARK + content}
    text = render(tokenizer, [*chat[:place], marked, *chat[place + 1 :]], options, closed=True)
    start = text.find(MARK)
    if start < 0 or text[:start] != whole[:start]:
        raise DataError(f"the chat template does not write turn {place + 1} where it can be found")
    return start


class RowLimit:
    """Refuses or cuts rows that are too long, and counts those.

    Args:
        positions: the most tokens that the model can read; None: no limit.
        max_length: rows are cut to so many tokens; None: none is cut, and one beyond ``positions``
            is refused.

    Raises:
        ConfigError: for a ``max_length`` out of range.
    """

    def __init__(self, positions: int | None = None, max_length: int | None = None) -> None:
        require_at_least(2, max_length=max_length)
        if positions is not None and max_length is not None and max_length > positions:
            raise ConfigError(
                f"max_length={max_length} is more than the {positions} positions that the model "
                "has; lower it"
            )
        self.max_length = max_length
        self.longest = max_length or positions or sys.maxsize
        self._cut: set[str] = set()
        self._skipped: set[str] = set()

    def fitted(self, rollout: Rollout) -> Rollout | None:
        """Return a rollout, cut if it has to be; None if nothing trained is left of it.

        Raises:
            DataError: if it is too long and nothing is to be cut.
        """
        [row] = rollout.rows
        if self.fits(rollout.prompt, row.length):
            return rollout
        self._cut.add(rollout.prompt.id)
        left = max(0, self.longest - len(row.prompt_ids))
        for column in (row.token_ids, row.loss_mask, row.logprobs, row.versions):
            del column[left:]
        rollout.finish_reason = "length"
        if any(row.loss_mask):
            return rollout
        self.leave_out(rollout.prompt)
        return None

    def fits(self, prompt: Prompt, length: int) -> bool:
        """Return whether a row is short enough.

        Raises:
            DataError: if it is not, and no ``max_length`` is given.
        """
        if length > self.longest and self.max_length is None:
            raise DataError(
                f"row {prompt.id} has {length} tokens, more than the {self.longest} positions that "
                f"the model has; shorten it, or set max_length: {self.longest} to cut such rows"
            )
        return length <= self.longest

    def leave_out(self, prompt: Prompt) -> None:
        """Count a row that is left out."""
        self._skipped.add(prompt.id)

    def tell(self, name: str, count: int) -> None:
        """Say once how many rows of a set were too long.

        Raises:
            DataError: if none of ``count`` is left.
        """
        cut, skipped = len(self._cut - self._skipped), len(self._skipped)
        if not count:
            raise DataError(
                f"{name}: all {skipped} rows are left out, since max_length={self.max_length} "
                "leaves none of them a trained token; raise it"
            )
        counts = [f"{cut} are cut"] * bool(cut) + [f"{skipped} are left out"] * bool(skipped)
        if counts:
            rank_zero_warn(
                f"{name}: of {count + skipped} rows {' and '.join(counts)}, being longer than "
                f"max_length={self.max_length}"
            )
