"""Checks the form of a recorded rollout: the type of every field."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout

Record = dict[str, Any]

WIDTH = 2**31
"""Integers in lists (tokens, versions) are stored in 32 signed bits."""
LARGEST = 2**63
"""The bound of other integers, which Parquet and SQLite can hold."""
_NUMBERS, _TEXTS = list[float] | None, list[str] | None
TOLD: dict[str, Any] = {
    "trainer_logprobs": _NUMBERS,
    "ref_logprobs": _NUMBERS,
    "advantages": _NUMBERS,
    "values": _NUMBERS,
    "returns": _NUMBERS,
    "pieces": _TEXTS,
    "prompt_pieces": _TEXTS,
}
"""Types of what ``RolloutRecorder`` records for each row beyond a rollout's fields."""
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
}


def checked(where: str, record: Any) -> Record:
    """Return the record with defaults for what it leaves out, if all its fields have the right
    form.

    Further fields stay unchanged.

    Raises:
        DataError: naming the location, the field and its value.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a rollout as a JSON object, got {shortened(record)}")
    try:
        if "rows" not in record and "token_ids" in record:
            raise _WrongFormError("token_ids stands outside of rows, as in an earlier, flat form")
        made: Record = {"iteration": 0} | _filled("", whole(record), Rollout)
        for name, hint in (("iteration", int), ("id", str)):
            _check(name, made.get(name, hint()), hint)
        for index, row in enumerate(made["rows"]):
            for name in TOLD.keys() & row.keys():
                _check(f"rows[{index}].{name}", row[name], TOLD[name])
        return made
    except _WrongFormError as error:
        raise DataError(
            f"{where}: not a rollout as `lightning-rl rollout` writes it: {error}; restore the "
            "file, or remove the line"
        ) from error


def whole(record: Record) -> Record:
    """Return a rollout's record with rows that hold what they inherit from the rollout.

    Malformed values stay unchanged, to be refused later.
    """
    rows = record.get("rows")
    if not isinstance(rows, list):
        return dict(record)
    return record | {
        "rows": [_whole_row(row, record) if isinstance(row, dict) else row for row in rows]
    }


def _whole_row(row: Record, record: Record) -> Record:
    """Return a row with what it inherits from its rollout: the prompt's tokens and sampling
    settings.
    """
    row, prompt, settings = dict(row), record.get("prompt"), record.get("sampling")
    if row.get("prompt_ids", ()) is None and isinstance(prompt, dict):
        row["prompt_ids"] = prompt.get("token_ids")
    if isinstance(row.get("sampling"), dict) and isinstance(settings, dict):
        row["sampling"] = settings | row["sampling"] if row["sampling"] else None
    return row


def shortened(value: Any) -> str:
    """Return a value's ``repr``, shortened to fit into a line of a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:57]}..."


class _WrongFormError(Exception):
    """A field has a value of the wrong form."""


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _filled(where: str, record: Any, kind: type) -> Record:
    """Return a dataclass's record; fields with a default may be missing."""
    if not isinstance(record, dict):
        raise _WrongFormError(f"{where.rstrip('.')} is not an object, but {shortened(record)}")
    hints, made = _hints(kind), dict(record)
    for field in fields(kind):
        name = f"{where}{field.name}"
        if field.name in record:
            made[field.name] = _check(name, record[field.name], hints[field.name])
        elif field.default is not MISSING:
            made[field.name] = field.default
        elif field.default_factory is not MISSING:
            made[field.name] = field.default_factory()
        else:
            raise _WrongFormError(f"{name} is missing")
    return made


def _check(name: str, value: Any, hint: Any) -> Any:
    """Return the value, with defaults filled in, if it matches its annotation."""
    if get_origin(hint) in (Union, UnionType):
        for choice in get_args(hint):
            if _is_of(value, choice):
                return _check(name, value, choice)
        raise _WrongFormError(f"{name} is {shortened(value)}, but must be {_said(hint)}")
    if not _is_of(value, hint):
        raise _WrongFormError(f"{name} is {shortened(value)}, but must be {_said(hint)}")
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _filled(f"{name}.", value, hint)  # type: ignore[arg-type]  # a class, not one made
    if origin is list:
        return _check_items(name, value, arguments[0])
    if origin is dict and arguments[1] is not Any:
        return {key: _check(f"{name}[{key!r}]", item, arguments[1]) for key, item in value.items()}
    if hint is int and not -LARGEST <= value < LARGEST:
        raise _WrongFormError(f"{name} is {shortened(value)}, but must fit into 64 bits")
    return value


def _check_items(name: str, values: list[Any], item: Any) -> list[Any]:
    if item is int and set(map(type, values)) <= {int}:  # at once: there are many tokens
        if values and not (min(values) >= -WIDTH and max(values) < WIDTH):
            wrong = next(v for v in values if not -WIDTH <= v < WIDTH)
            raise _WrongFormError(f"{name} holds {shortened(wrong)}, but must fit into 32 bits")
        return values
    if item in (bool, float) and set(map(type, values)) <= ({bool} if item is bool else {float}):
        return values
    return [_check(f"{name}[{index}]", value, item) for index, value in enumerate(values)]


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a JSON value matches an annotation, without looking into containers."""
    origin = get_origin(hint) or hint
    if origin is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, StrEnum):
        return value in tuple(origin)
    if is_dataclass(origin) or origin is dict:
        return isinstance(value, dict)
    if origin is float:
        return type(value) in (int, float)
    return type(value) is origin


def _said(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_said, get_args(hint)))
    origin = get_origin(hint) or hint
    if origin is list:
        return "a list"
    if isinstance(origin, type) and issubclass(origin, StrEnum):
        return f"one of {', '.join(origin)}"
    return _WORDS.get(origin, "an object")
