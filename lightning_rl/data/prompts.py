"""Prompts: rows from files or code, tokenised once, drawn in an order that a checkpoint holds."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rollout import Message, Prompt, Rollout
from lightning_rl.run.seeding import permutation, run_seed

Row = dict[str, Any]


@configurable
class PromptDataset(ABC):
    """Rows with a prompt each, drawn without end in a seeded order, epoch after epoch.

    A prompt is a string, tokenised as it is, or a list of chat messages, rendered by the
    tokenizer's own chat template with its generation prompt. All other columns reach the rewards by
    name.

    Args:
        prompt_column: where the prompt is.
        id_column: a unique name per row; None: the row's number.
        max_prompt_tokens: longer prompts are dropped and counted (``dropped``); never truncated.
        shuffle: draw each epoch in a new order, fixed by ``seed``; False keeps the rows' order.
        seed: of the orders; None: ``seed_everything``'s.
    """

    def __init__(
        self,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        max_prompt_tokens: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.prompt_column = prompt_column
        self.id_column = id_column
        self.max_prompt_tokens = max_prompt_tokens
        self.shuffle = shuffle
        self.seed = run_seed(seed)
        self.dropped = 0
        self.fingerprint: str | None = None
        """Tells other rows from these, when they are loaded."""
        self._rows: Sequence[tuple[str, Row]] | None = None
        self._room: int | None = None  # tokens that the engine leaves for a prompt
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._chat_options: dict[str, Any] = {}
        self._epoch = 0
        self._cursor = 0
        self._order: list[int] = []
        self._dropped_rows: set[int] = set()

    @abstractmethod
    def read(self) -> Iterable[tuple[str, Any]]:
        """Yield ``(where, row)``: a place that an error message can name, and a mapping.

        Raises:
            DataError: naming the place and what was expected there.
        """

    def load(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        """Read and check all rows; ``tokenizer`` is what turns them into tokens when drawn.

        ``chat_options`` are further variables for its chat template, such as ``tools``.
        """
        self._tokenizer = tokenizer
        self._chat_options = dict(chat_options or {})
        if self._rows is not None:
            return
        rows = []
        for where, row in self.read():
            self._check(where, row)
            rows.append((where, dict(row)))
        if not rows:
            raise DataError(f"{self!r} holds no rows; expected at least one with a prompt")
        self._rows = rows
        self.fingerprint = f"{len(rows)} rows {_digest(row for _, row in rows)}"
        self._order = self._permutation(self._epoch)

    def __len__(self) -> int:
        return len(self._loaded())

    def __getitem__(self, index: int) -> Prompt:
        """Row ``index`` as a prompt, tokenised now."""
        where, row = self._loaded()[index]
        columns = dict(row)
        text = columns.pop(self.prompt_column)
        token_ids = self._tokenize(where, text)
        return Prompt(self._prompt_id(index), text, token_ids, columns)

    def _prompt_id(self, index: int) -> str:
        _, row = self._loaded()[index]
        return str(row[self.id_column] if self.id_column else index)

    def draw(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts that are short enough; goes on into the next epoch.

        Raises:
            DataError: if a whole epoch holds no prompt that is short enough.
        """
        self._loaded()
        prompts: list[Prompt] = []
        misses = 0
        while len(prompts) < count:
            index = self._next_index()
            prompt = self[index]
            if self.fits(prompt):
                prompts.append(prompt)
                misses = 0
                continue
            misses += 1
            self._dropped_rows.add(index)
            self.dropped = len(self._dropped_rows)
            if misses >= len(self):
                raise self._all_too_long()
        return prompts

    def _next_index(self) -> int:
        """The row to draw next, however long its prompt is."""
        if self._cursor == len(self._order):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._permutation(self._epoch)
        self._cursor += 1
        return self._order[self._cursor - 1]

    def first(self, count: int | None = None) -> list[Prompt]:
        """The first ``count`` rows (all for None) that are short enough, in file order."""
        prompts: list[Prompt] = []
        for index in range(len(self)):
            if count is not None and len(prompts) == count:
                break
            prompt = self[index]
            if self.fits(prompt):
                prompts.append(prompt)
        return prompts

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Hear of every group of these prompts that was graded, kept or not; here: nothing."""

    def shares(self) -> dict[str, float]:
        """Expected share of each named set in the groups to come; {} where there are none."""
        return {}

    def bound(self, room: int) -> None:
        """Drop prompts of more than ``room`` tokens too: the engine takes no longer ones."""
        self._room = room

    def fits(self, prompt: Prompt) -> bool:
        """Tell if the prompt is within ``max_prompt_tokens``, and the engine has room for it."""
        limits = (self.max_prompt_tokens, self._room)
        return all(limit is None or len(prompt.token_ids) <= limit for limit in limits)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as primitives."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "seed": self.seed,
            "rows": len(self._loaded()),
            "dropped_rows": sorted(self._dropped_rows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            ConfigError: if the order was made with another seed, or of another number of rows.
        """
        if "sets" in state:
            raise ConfigError(
                f"the checkpoint's prompts were a Mixture of {', '.join(state['sets'])}, now they "
                f"are {self!r}; give it the same sets to go on where the run stopped"
            )
        if state["seed"] != self.seed:
            raise ConfigError(
                f"the checkpoint's prompts were shuffled with seed={state['seed']}, now it is "
                f"{self.seed}; set it back to go on where the run stopped"
            )
        if state["rows"] != len(self._loaded()):
            raise ConfigError(
                f"the checkpoint's prompts were {state['rows']} rows, now {self!r} holds "
                f"{len(self._loaded())}; give it the same rows to go on where the run stopped"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._dropped_rows = set(state["dropped_rows"])
        self.dropped = len(self._dropped_rows)
        self._order = self._permutation(self._epoch)

    def _loaded(self) -> Sequence[tuple[str, Row]]:
        if self._rows is None:
            raise ConfigError(f"{self!r} is not loaded yet; call load(tokenizer) first")
        return self._rows

    def _all_too_long(self) -> DataError:
        """Names the bound that the prompts break: the user's own, or what the engine leaves."""
        limit, room = self.max_prompt_tokens, self._room
        if room is not None and (limit is None or room < limit):
            what = (
                f"the {room} tokens that the engine has room for beside sampling.max_tokens; raise "
                "engine.max_model_len, lower sampling.max_tokens, or shorten the prompts"
            )
        else:
            what = f"max_prompt_tokens={limit}; raise it"
        return DataError(f"{self!r}: all {len(self)} prompts are longer than {what}")

    def _permutation(self, epoch: int) -> list[int]:
        count = len(self._loaded())
        return permutation(count, self.seed, epoch) if self.shuffle else list(range(count))

    def _check(self, where: str, row: Any) -> None:
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where}: expected an object with a {self.prompt_column!r}, got {row!r:.80}"
            )
        if self.prompt_column not in row:
            raise DataError(
                f"{where}: no column {self.prompt_column!r} among {sorted(row)}; set prompt_column"
            )
        if self.id_column is not None and self.id_column not in row:
            raise DataError(
                f"{where}: no column {self.id_column!r} among {sorted(row)}; set id_column"
            )
        for column, value in row.items():
            if (half := _lone_surrogate(value)) is not None:
                raise DataError(
                    f"{where}: column {column!r} holds {half!r}, half of a character (a lone "
                    "surrogate), which is no text; write the whole character, or remove it"
                )
        prompt = row[self.prompt_column]
        if isinstance(prompt, str) and prompt:
            return
        if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
            return
        raise DataError(
            f"{where}: {self.prompt_column!r} must be a non-empty string or a list of "
            f'{{"role": ..., "content": ...}} messages, got {prompt!r:.80}'
        )

    def _tokenize(self, where: str, prompt: str | list[Message]) -> list[int]:
        assert self._tokenizer is not None
        if isinstance(prompt, str):
            token_ids = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
        elif self._tokenizer.chat_template is None:
            raise DataError(
                f"{where}: the prompt is a chat, but the tokenizer has no chat template; use plain "
                "text prompts, or set tokenizer.chat_template and save the tokenizer"
            )
        else:
            text = self._tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **self._chat_options
            )
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not token_ids:
            raise DataError(f"{where}: the prompt {prompt!r:.80} has no tokens")
        return list(token_ids)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and "content" in message


def _lone_surrogate(value: Any) -> str | None:
    """The first in a string, or in those of a list or mapping; None if there is none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
    elif isinstance(value, Mapping):
        return _lone_surrogate([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        return next((half for item in value if (half := _lone_surrogate(item)) is not None), None)
    return None


def _digest(rows: Iterable[Row]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode())
    return digest.hexdigest()


class Prompts(Protocol):
    """Draws prompts without end; a ``PromptDataset``."""

    def draw(self, count: int, /) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...
