"""Shaping: turns rows of data into rows with a prompt, and checks them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightning_rl.data.chats import as_chat, is_chat
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.tables import Table
from lightning_rl.errors import ConfigError, DataError

Row = dict[str, Any]
Where = Callable[[], str]
"""Returns the location of a row, for an error message."""
KEPT_FROM = 10_000
"""Results about rows are cached beside the data from this many rows on; fewer are read quickly."""
_FORM = 4
"""Increased with each change of what rows or their texts become, so that no result cached before it
is used.
"""
_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class Shaping:
    """Turns rows of data into rows of prompts by ``map``, ``columns``, ``template``, ``system``, in
    order.

    The arguments are those of ``PromptDataset``.

    Raises:
        ConfigError: if the template cannot be parsed, or names no column.
    """

    def __init__(
        self,
        prompt_column: str,
        id_column: str | None,
        columns: Mapping[str, str] | None,
        template: str | None,
        system: str | None,
        chat: bool,
        map: Callable[[Row], Row] | None,
    ) -> None:
        self.prompt_column = prompt_column
        self.id_column = id_column
        self.columns = dict(columns or {})
        self.system = system
        self.chat = chat or system is not None
        self.map = map
        self.implied: ImpliedPrompts | None = None
        """Finds the prompts of rows of whole conversations, for supervised training."""
        self._template = None if template is None else _JINJA.from_string(_sound(template))
        self._told = [_FORM, prompt_column, id_column, self.columns, template, system, chat]

    @property
    def told(self) -> list[Any]:
        """All settings that shape the rows, except code; primitives."""
        return [*self._told, repr(self.implied)]

    def __call__(self, where: Where, row: Any) -> Any:
        """Return the row in the form of prompts; rows that are malformed or lack a prompt fail
        ``check``.

        Raises:
            DataError: if the row lacks a column, or if ``map`` or the template fails on it.
        """
        if self.map is not None:
            row = self._mapped(where, row)
        if not isinstance(row, Mapping):
            return row
        shaped = dict(row)
        taken = {name: self._column(where, row, name, old) for name, old in self.columns.items()}
        for old in self.columns.values():
            shaped.pop(old, None)
        shaped |= taken
        if self._template is not None:
            shaped[self.prompt_column] = self._filled(where, shaped)
        if self.implied is not None:
            shaped = self.implied(shaped, self.prompt_column)
        prompt = shaped.get(self.prompt_column)
        if self.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            begin = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = begin + as_chat(prompt)
        if prompt is not None:
            shaped[self.prompt_column] = prompt
        return shaped

    def _mapped(self, where: Where, row: Any) -> Any:
        assert self.map is not None
        try:
            return self.map(dict(row))  # a copy: it may change what it is given
        except Exception as error:
            name = getattr(self.map, "__name__", self.map)
            raise DataError(
                f"{where()}: map={name} fails on {row!r:.80}: {type(error).__name__}: {error}"
            ) from error

    def _column(self, where: Where, row: Mapping[str, Any], name: str, old: str) -> Any:
        if old not in row:
            raise DataError(
                f"{where()}: no column {old!r} among {sorted(row)}; correct columns.{name}"
            )
        return row[old]

    def _filled(self, where: Where, row: Row) -> str:
        assert self._template is not None
        try:
            return self._template.render(row)
        except Exception as error:  # whatever the values make of it
            raise DataError(
                f"{where()}: template: {error}; the columns are {sorted(row)}"
            ) from error

    def check(self, where: Where, row: Any) -> None:
        """Refuse a row without a valid prompt.

        Raises:
            DataError: naming the location and what was expected there.
        """
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where()}: expected an object with a {self.prompt_column!r}, got {row!r:.80}"
            )
        if self.prompt_column not in row:
            raise DataError(
                f"{where()}: no column {self.prompt_column!r} among {sorted(row)}; set "
                "prompt_column, columns or template"
            )
        if self.id_column is not None and self.id_column not in row:
            raise DataError(
                f"{where()}: no column {self.id_column!r} among {sorted(row)}; set id_column"
            )
        for column, value in row.items():
            if (half := _lone_surrogate(value)) is not None:
                raise DataError(
                    f"{where()}: column {column!r} holds {half!r}, half of a character (a lone "
                    "surrogate), which is not valid text; write the whole character, or remove it"
                )
        prompt = row[self.prompt_column]
        if isinstance(prompt, str) and prompt:
            return
        if is_chat(prompt) and all("content" in message for message in prompt):
            return
        raise DataError(
            f"{where()}: {self.prompt_column!r} must be a non-empty string or a list of "
            f'{{"role": ..., "content": ...}} messages, got {prompt!r:.80}'
        )


class ShapedRows:
    """The rows of a table that ``filter`` keeps, shaped each time they are read.

    Args:
        table: the rows of the data.
        shaping: turns them into rows of prompts.
        filter: returns whether a row of the data is kept; it is called for all rows at once.

    Raises:
        DataError: if ``filter`` fails on a row.
    """

    def __init__(
        self, table: Table, shaping: Shaping, filter: Callable[[Row], bool] | None
    ) -> None:
        self._table = table
        self._shaping = shaping
        self._places: np.ndarray | range = range(len(table))
        self._runs_code = filter is not None or shaping.map is not None
        if filter is not None:
            self._places = np.fromiter(self._kept_by(filter), dtype=np.int64)

    def _kept_by(self, filter: Callable[[Row], bool]) -> Iterator[int]:
        for index, row in enumerate(self._table):
            try:
                kept = filter(row)
            except Exception as error:
                name = getattr(filter, "__name__", filter)
                raise DataError(
                    f"{self._table.where(index)}: filter={name} fails on {row!r:.80}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if kept:
                yield index

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        """Return a row, checked."""
        row_index = self.place(index)
        return self._checked(row_index, self._table[row_index])

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, checked."""
        return (self._checked(place, row) for place, row in self._in_order())

    def unchecked(self) -> Iterator[Any]:
        """Yield all rows, with or without a prompt."""
        for place, row in self._in_order():
            yield self._shaping(partial(self._table.where, place), row)

    def _checked(self, place: int, row: Any) -> Row:
        where = partial(self._table.where, place)
        shaped = self._shaping(where, row)
        self._shaping.check(where, shaped)
        return shaped

    def _in_order(self) -> Iterator[tuple[int, Any]]:
        places = iter(self._places)
        wanted = next(places, None)
        for index, row in enumerate(self._table):  # in one go: row by row, tables are slower
            if index == wanted:
                yield index, row
                wanted = next(places, None)

    def place(self, index: int) -> int:
        """Return the number of a row in the table."""
        return int(self._places[index])

    def where(self, index: int) -> str:
        """Return the location of a row, for an error message."""
        return self._table.where(self.place(index))

    def kept(self, key: str, make: Callable[[], np.ndarray]) -> np.ndarray | None:
        """Return an array of results about all rows, cached on disk; None if it is not cached.

        It is not cached for few rows, or if code shapes them, which may have changed since.
        """
        cache = self._table.cache()
        if len(self) < KEPT_FROM or self._runs_code or cache is None:
            return None
        return cache.array([self._shaping.told, key], make)

    def digest(self) -> str:
        """Return a digest of the rows, as hex; all of them are checked for it."""
        kept = self.kept("digest", self._digest)
        return (self._digest() if kept is None else kept).tobytes().hex()

    def _digest(self) -> np.ndarray:
        digest = hashlib.blake2b(digest_size=8)
        for row in self:
            text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
            digest.update(text.encode())
        return np.frombuffer(digest.digest(), dtype=np.uint8)


def _sound(template: str) -> str:
    try:
        named = meta.find_undeclared_variables(_JINJA.parse(template))
    except TemplateError as error:
        raise ConfigError(
            f"template={template!r:.80} cannot be read as Jinja: {error}; a column is written "
            "{{ question }}"
        ) from error
    if not named:
        raise ConfigError(
            f"template={template!r:.80} names no column, so all prompts would be the same; write "
            "one as {{ question }}"
        )
    return template


def _lone_surrogate(value: Any) -> str | None:
    """Return the first lone surrogate in a value's strings; None if there is none."""
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=lambda _: None).encode()
    except UnicodeEncodeError as error:
        return str(error.object[error.start])
    except ValueError:  # no JSON, as it holds itself, or an integer of thousands of digits
        return None
    return None
