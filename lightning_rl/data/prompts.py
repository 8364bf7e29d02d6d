"""Prompts: rows from files or code, tokenised once, drawn in an order that checkpoints hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import begins_turn
from lightning_rl.data.encoding import PromptEncoder
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.prompt_pictures import PictureSource
from lightning_rl.data.row_order import RowOrder
from lightning_rl.data.shaping import Row, ShapedRows, Shaping
from lightning_rl.data.tables import ListTable, Table
from lightning_rl.errors import ConfigError, DataError, PictureError
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.seeding import run_seed
from lightning_rl.vision.downloads import AT_ONCE
from lightning_rl.vision.limits import OWN, PictureAccess, PictureLimits
from lightning_rl.vision.reader import reader_of

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
        self._encoder: PromptEncoder | None = None
        self._order = RowOrder()
        self._dropped_rows: set[int] = set()

    def imply(self, prompts: ImpliedPrompts) -> None:
        """Take the prompts of rows of whole conversations from them; before :meth:`load`."""
        self._shaping.implied = prompts

    def row_columns(self) -> set[str]:
        """Return the names of the first row's columns, without that of the prompt."""
        return {*self._loaded()[0]} - {self.prompt_column} if len(self) else set()

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
        self._encoder = PromptEncoder(tokenizer, chat_options)
        if self._shaped is None:
            rows = self.shaped()
            if not len(rows):
                raise DataError(f"{self!r} holds no rows; expected at least one with a prompt")
            self._shaped = rows
            self.fingerprint = f"{len(rows)} rows {rows.digest()}"
            self._begin_order()
        self._check_first()
        key = self._encoder.key if self.max_prompt_tokens is not None else None
        self._lengths = None if key is None else self._shaped.kept(key, self._measure)

    def longest(self) -> int | None:
        """Return the most tokens that a prompt may have and is not dropped; None if not known.

        It is not known if the model reads pictures, since these are read when they are drawn.
        """
        assert self._encoder is not None
        if reader_of(self._encoder.tokenizer) is not None:
            return None
        if self._lengths is None:
            key = self._encoder.key
            kept = None if key is None else self._loaded().kept(key, self._measure)
            self._lengths = self._counted() if kept is None else kept
        limit = self.max_prompt_tokens
        short = self._lengths if limit is None else self._lengths[self._lengths <= limit]
        return int(short.max()) if len(short) else limit

    def _check_first(self) -> None:
        """Find what is wrong with the tokenizer before anything is started."""
        assert self._encoder is not None
        if not len(self):  # of a stream, whose further blocks may hold some
            return
        row, where = self._loaded()[0], partial(self._loaded().where, 0)
        self._encoder.check(row.pop(self.prompt_column), row, where)

    def _measure(self) -> np.ndarray:
        rank_zero_info(f"{self!r}: measuring {len(self)} prompts, once for this tokenizer")
        return self._counted()

    def _counted(self) -> np.ndarray:
        """Return the number of tokens of each prompt; all were checked when they were loaded."""
        assert self._encoder is not None
        rows = ((row[self.prompt_column], row) for row in self._loaded().unchecked())
        return self._encoder.lengths(rows, partial(repr, self))

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
        assert self._encoder is not None
        where = partial(self._loaded().where, index)
        token_ids, places, begun = self._encoder.encode(text, pictures, where, columns)
        asked = text[:-1] if isinstance(text, list) and begins_turn(text) else text
        return Prompt(
            prompt_id, asked, token_ids, columns, pictures=pictures, places=places, begun=begun
        )

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
        if self._order.ended:
            self._order.epoch += 1
            self._begin_order()
        return self._order.next()

    def _begin_order(self, cursor: int = 0) -> None:
        self._order.begin(len(self), self.seed if self.shuffle else None, cursor=cursor)

    def _upcoming(self) -> Iterable[int]:
        """Return some of the rows that :meth:`draw` reads next, as far as they are known."""
        return self._order.upcoming(AT_ONCE)

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
            rank_zero_warn(f"{self._loaded().where(index)} is left out: {error}")
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
            "epoch": self._order.epoch,
            "cursor": self._order.cursor,
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
        self._dropped_rows = set(state["dropped_rows"])
        self.dropped = len(self._dropped_rows)
        self._order.epoch = state["epoch"]
        self._begin_order(state["cursor"])

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


class Prompts(Protocol):
    """Draws prompts endlessly, as a ``PromptDataset`` does."""

    @property
    def dropped(self) -> int: ...

    def draw(self, count: int, /) -> list[Prompt]: ...

    def observe(self, groups: Sequence[Sequence[Rollout]], /) -> None: ...

    def shares(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...
