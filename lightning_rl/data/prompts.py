"""Prompts: rows from files or code, tokenised once, drawn in an order that checkpoints hold."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import render
from lightning_rl.data.pictured import PictureSource
from lightning_rl.data.shaping import Row, ShapedRows, Shaping
from lightning_rl.data.tables import ListTable, Table
from lightning_rl.errors import ConfigError, DataError, PictureError
from lightning_rl.rollout import Message, Picture, Prompt, Rollout
from lightning_rl.run.seeding import permutation, run_seed
from lightning_rl.vision.begins import begin_fault, begun_once
from lightning_rl.vision.downloads import AT_ONCE
from lightning_rl.vision.limits import OWN, PictureAccess, PictureLimits
from lightning_rl.vision.reader import encode

_BATCH = 1000
"""Number of prompts that are measured at a time."""
_TOLD = 10
"""Number of rows without their pictures that are reported individually."""


@configurable
class PromptDataset(ABC):
    """Rows with one prompt each, drawn endlessly in a seeded order, epoch after epoch.

    A prompt is a string, tokenised as it is, or a list of chat messages, rendered by the
    tokenizer's own chat template with its generation prompt. Rewards receive all other columns by
    name. Rows of the data become such rows by ``filter``, ``map``, ``columns``, ``template`` and
    ``system``, in this order. The first two are called for all rows each time they are loaded.

    Args:
        prompt_column: the column with the prompt.
        id_column: the column with a unique name per row; None: the row's number.
        max_prompt_tokens: longer prompts are dropped and counted (``dropped``); never truncated.
        shuffle: draw each epoch in a new order, fixed by ``seed``; False keeps the rows' order.
        seed: seeds the orders; None: the seed of ``seed_everything``.
        columns: new names of columns, each with its name in the data: ``{"solution": "answer"}``.
        template: the prompt, as a Jinja template of the row's columns: ``"{{ question }} Think."``
        system: a system message before the prompt, which makes it a chat.
        chat: turn a text prompt into the user's message of a chat.
        filter: a function of a row that returns whether it is kept; in YAML its import path.
        map: a function that returns the row to use in place of a row; in YAML its import path.
        images_column: pictures of the row, a list or one: paths (relative to the file), URLs, or
            the values of 🤗 datasets' Image column. They replace the ``{"type": "image"}`` parts of
            a chat, or else precede its text; content parts may name pictures themselves. They are
            read when the row is drawn. A row with a picture that cannot be read is left out and
            counted.
        picture_limits: limits of the pictures' sizes.

    Raises:
        ConfigError: if the template cannot be parsed.
    """

    def __init__(
        self,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        max_prompt_tokens: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
        filter: Callable[[Row], bool] | None = None,
        map: Callable[[Row], Row] | None = None,
        images_column: str | None = "images",
        picture_limits: PictureLimits = PictureLimits(),
    ) -> None:
        self.prompt_column = prompt_column
        self.id_column = id_column
        self.max_prompt_tokens = max_prompt_tokens
        self.shuffle = shuffle
        self.seed = run_seed(seed)
        self.dropped = 0
        self.fingerprint: str | None = None
        """Identifies the rows that were loaded; other rows have another fingerprint."""
        self.columns = columns
        self.template = template
        self.system = system
        self.chat = chat
        self.filter = filter
        self.map = map
        self.images_column = images_column
        self.picture_limits = picture_limits
        self._without: set[int] = set()  # rows of which a picture could not be had
        self._shaping = Shaping(prompt_column, id_column, columns, template, system, chat, map)
        self._shaped: ShapedRows | None = None
        self._lengths: np.ndarray | None = None  # of all prompts in tokens, where that is kept
        self._room: int | None = None  # tokens that the engine leaves for a prompt
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._chat_options: dict[str, Any] = {}
        self._epoch = 0
        self._cursor = 0
        self._order: Sequence[int] | np.ndarray = []
        self._dropped_rows: set[int] = set()
        self._begin_told = False

    @abstractmethod
    def read(self) -> Iterable[tuple[str, Any]]:
        """Yield ``(where, row)``: a location that error messages can name, and a mapping.

        Raises:
            DataError: naming the location and what was expected there.
        """

    def table(self) -> Table:
        """Return the rows of :meth:`read` by number; by default they are held in memory."""
        return ListTable(self.read())

    def shaped(self) -> ShapedRows:
        """Return the rows in the form of prompts, without a tokenizer."""
        return ShapedRows(self.table(), self._shaping, self.filter)

    def load(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        """Read and check all rows; ``tokenizer`` turns them into tokens when they are drawn.

        Many rows on disk are checked once, and with ``max_prompt_tokens`` all prompts are measured
        once per tokenizer: the results are cached beside the data. ``chat_options`` are further
        variables of the tokenizer's chat template, such as ``tools``.
        """
        self._tokenizer = tokenizer
        self._chat_options = dict(chat_options or {})
        if self._shaped is None:
            rows = self.shaped()
            if not len(rows):
                raise DataError(f"{self!r} holds no rows; expected at least one with a prompt")
            self._shaped = rows
            self.fingerprint = f"{len(rows)} rows {rows.digest()}"
            self._order = self._permutation(self._epoch)
        if self.max_prompt_tokens is not None:
            self._lengths = self._measured()

    def _measured(self) -> np.ndarray | None:
        """Return the number of tokens of all prompts, if it is cached between loads."""
        key = _key_of(self._tokenizer, self._chat_options)
        return None if key is None else self._loaded().kept(key, self._measure)

    def _measure(self) -> np.ndarray:
        rank_zero_info(f"{self!r}: measuring {len(self)} prompts, once for this tokenizer")
        assert self._tokenizer is not None
        # All were checked when they were loaded.
        prompts = (row[self.prompt_column] for row in self._loaded().unchecked())
        lengths: list[np.ndarray] = []
        while batch := list(islice(prompts, _BATCH)):
            counts = np.zeros(len(batch), dtype=np.uint32)
            for chat in (False, True):
                places = [i for i, prompt in enumerate(batch) if isinstance(prompt, str) != chat]
                if places:
                    counts[places] = self._counted([batch[place] for place in places], chat)
            lengths.append(counts)
        return np.concatenate(lengths)

    def _counted(self, prompts: list[Any], chat: bool) -> list[int]:
        """Return the number of tokens of each prompt; all are chats, or none is."""
        assert self._tokenizer is not None
        texts = self._rendered(prompts, lambda: repr(self)) if chat else prompts
        found = self._tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)
        listed = found["input_ids"]
        listed = listed if chat else [begun_once(self._tokenizer, ids) for ids in listed]
        return [len(token_ids) for token_ids in listed]

    def __len__(self) -> int:
        return len(self._loaded())

    def __getitem__(self, index: int) -> Prompt:
        """Return row ``index`` as a prompt, tokenised now."""
        return self._read_prompt(index)

    def _read_prompt(self, index: int, upcoming: Iterable[int] = ()) -> Prompt:
        """Return row ``index`` as a prompt; ``upcoming`` are the rows probably read next."""
        columns = self._loaded()[index]
        prompt_id = str(columns[self.id_column] if self.id_column else self._number(index))
        rows = (self._loaded()[row] for row in upcoming)
        later = ((row[self.prompt_column], row) for row in rows)
        text, pictures = self._pictures.of(columns.pop(self.prompt_column), columns, later)
        token_ids, places = self._tokenize(index, text, pictures)
        return Prompt(prompt_id, text, token_ids, columns, pictures=pictures, places=places)

    @cached_property
    def _pictures(self) -> PictureSource:
        return PictureSource(self.images_column, self.picture_limits, self.pictures_from)

    def pictures_from(self) -> tuple[Path | None, PictureAccess]:
        """Return the folder of relative picture paths (None: the working directory), and allowed
        sources.
        """
        return None, OWN

    def _prompt_id(self, index: int) -> str:
        return str(self._loaded()[index][self.id_column] if self.id_column else self._number(index))

    def _number(self, index: int) -> int:
        """Return a number that identifies a row."""
        return index

    def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts that are short enough, continuing into the next epoch.

        Raises:
            DataError: if a whole epoch has no prompt that is short enough and has its pictures.
        """
        self._loaded()
        prompts: list[Prompt] = []
        misses = 0
        while len(prompts) < count:
            index = self._next_index()
            prompt = self._fitting(index, self._upcoming())
            if prompt is not None:
                prompts.append(prompt)
                misses = 0
                continue
            misses += 1
            self._dropped_rows.add(self._number(index))
            self.dropped = len(self._dropped_rows)
            if misses >= len(self):
                raise self._none_fits()
        return prompts

    def _next_index(self) -> int:
        """Return the row to draw next, however long its prompt is."""
        if self._cursor == len(self._order):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._permutation(self._epoch)
        self._cursor += 1
        return int(self._order[self._cursor - 1])

    def _upcoming(self) -> Iterable[int]:
        """Return some of the rows that :meth:`draw` reads next, as far as they are known."""
        return map(int, self._order[self._cursor : self._cursor + AT_ONCE])

    def _fitting(self, index: int, upcoming: Iterable[int] = ()) -> Prompt | None:
        """Return row ``index`` as a prompt; None if it is too long, or lacks a picture.

        A prompt known to be too long even without its pictures is not read.
        """
        if self._lengths is not None and not self._within(int(self._lengths[index])):
            return None
        try:
            prompt = self._read_prompt(index, upcoming)
        except PictureError as error:
            self._leave_out(index, error)
            return None
        return prompt if self.fits(prompt) else None

    def _leave_out(self, index: int, error: PictureError) -> None:
        """Report that a row is left out, once, as a row comes again in every epoch."""
        number = self._number(index)
        if number in self._without:
            return
        self._without.add(number)
        if len(self._without) <= _TOLD:
            rank_zero_warn(f"{self._where(index)} is left out: {error}")
        if len(self._without) == _TOLD:
            rank_zero_warn(
                f"{self!r}: further rows with pictures that cannot be read are only counted"
            )

    def first(self, count: int | None = None) -> list[Prompt]:
        """Return the first ``count`` rows (None: all) that are short enough, in file order."""
        return [prompt for _, prompt in islice(self.numbered(), count)]

    def numbered(self) -> Iterator[tuple[int | None, Prompt]]:
        """Yield the rows that are short enough, one at a time, in file order.

        Each comes with the index by which it can be read again; None if it cannot.
        """
        for index in range(len(self)):
            upcoming = range(index + 1, min(index + 1 + AT_ONCE, len(self)))
            prompt = self._fitting(index, upcoming)
            if prompt is not None:
                yield index, prompt

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Called with every graded group of these prompts, kept or not; does nothing here."""

    def shares(self) -> dict[str, float]:
        """Return the expected share of each named set in the groups to come; {} without any."""
        return {}

    def bound(self, room: int) -> None:
        """Also drop prompts of more than ``room`` tokens, too long for the engine."""
        self._room = room

    def fits(self, prompt: Prompt) -> bool:
        """Return whether the prompt is within ``max_prompt_tokens`` and the engine's limit."""
        return self._within(len(prompt.token_ids))

    def _within(self, tokens: int) -> bool:
        limits = (self.max_prompt_tokens, self._room)
        return all(limit is None or tokens <= limit for limit in limits)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, as primitives."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "seed": self.seed,
            "rows": len(self._loaded()),
            "dropped_rows": sorted(self._dropped_rows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: if the order was made with another seed, or for another number of rows.
        """
        if "sets" in state:
            raise ConfigError(
                f"the checkpoint's prompts were a Mixture of {', '.join(state['sets'])}, now they "
                f"are {self!r}; give it the same sets to resume"
            )
        if state["seed"] != self.seed:
            raise ConfigError(
                f"the checkpoint's prompts were shuffled with seed={state['seed']}, now it is "
                f"{self.seed}; restore it to resume"
            )
        if state["rows"] != len(self._loaded()):
            raise ConfigError(
                f"the checkpoint's prompts were {state['rows']} rows, now {self!r} holds "
                f"{len(self._loaded())}; give it the same rows to resume"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._dropped_rows = set(state["dropped_rows"])
        self.dropped = len(self._dropped_rows)
        self._order = self._permutation(self._epoch)

    def _loaded(self) -> ShapedRows:
        if self._shaped is None:
            raise ConfigError(f"{self!r} is not loaded yet; call load(tokenizer) first")
        return self._shaped

    def _none_fits(self) -> DataError:
        """Return an error that names the exceeded limit: the user's own, or the engine's."""
        if self._without:
            return DataError(
                f"{self!r}: of {len(self)} prompts {len(self._without)} have pictures that cannot "
                "be read, and the others are too long; see the warnings above"
            )
        limit, room = self.max_prompt_tokens, self._room
        if room is not None and (limit is None or room < limit):
            what = (
                f"the {room} tokens that the engine has room for beside sampling.max_tokens; raise "
                "engine.max_model_len, lower sampling.max_tokens, or shorten the prompts"
            )
        else:
            what = f"max_prompt_tokens={limit}; raise it"
        return DataError(f"{self!r}: all {len(self)} prompts are longer than {what}")

    def _permutation(self, epoch: int) -> Sequence[int] | np.ndarray:
        count = len(self._loaded())
        return permutation(count, self.seed, epoch).numpy() if self.shuffle else range(count)

    def _tokenize(
        self, index: int, prompt: str | list[Message], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[int]]:
        """Return token ids, and the indices at which pictures begin among them."""
        assert self._tokenizer is not None
        text, is_chat = self._text(index, prompt)
        token_ids, places = encode(self._tokenizer, text, pictures, special=not is_chat)
        if not token_ids:
            raise DataError(f"{self._where(index)}: the prompt {prompt!r:.80} has no tokens")
        if not self._begin_told and (fault := begin_fault(self._tokenizer, token_ids)):
            self._begin_told = True
            rank_zero_warn(
                f"{self._where(index)}: the prompt {fault}; further rows are not reported"
            )
        return token_ids, places

    def _text(self, index: int, prompt: str | list[Message]) -> tuple[str, bool]:
        """Return the text to tokenise, and whether it is a chat's, which includes all special
        tokens.
        """
        if isinstance(prompt, str):
            return prompt, False
        return self._rendered([prompt], lambda: self._where(index))[0], True

    def _rendered(self, chats: list[list[Message]], where: Callable[[], str]) -> list[str]:
        assert self._tokenizer is not None
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{where()}: the prompt is a chat, but the tokenizer has no chat template; use "
                "plain text prompts, or set tokenizer.chat_template and save the tokenizer"
            )
        try:
            return render(self._tokenizer, chats, self._chat_options)
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{where()}: the chat template cannot render the prompt: {error}; correct its "
                "messages, or use a model whose template supports them"
            ) from error

    def _where(self, index: int) -> str:
        return self._loaded().where(index)


def _key_of(tokenizer: Any, chat_options: Mapping[str, Any]) -> str | None:
    """Return a key of all that turns prompts into tokens; None for tokenizers that do not expose
    it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    variables = getattr(tokenizer.apply_chat_template, "keywords", {})
    told = [backend.to_str(), tokenizer.chat_template, variables, chat_options]
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=repr).encode()).hexdigest()


class Prompts(Protocol):
    """Draws prompts endlessly, as a ``PromptDataset`` does."""

    def draw(self, count: int, /) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...
