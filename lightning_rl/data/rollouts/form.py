"""The form of a recorded rollout: what must be a list, a number or a text, and is."""

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
"""Integers in lists (tokens, versions) are stored in 32 bits, with sign."""
LARGEST = 2**63
"""Of any other integer: what Parquet and SQLite can hold."""
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
"""What ``RolloutRecorder`` tells beyond a rollout, of each of its rows."""
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
}


def checked(where: str, record: Any) -> Record:
    """The record with what it leaves out, if everything in it is as a rollout's.

    What it tells beyond a rollout's fields stays as it is.

    Raises:
        DataError: naming the place, the field, and what stands there.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a rollout, an object, got {shortened(record)}")
    try:
        made: Record = {"iteration": 0} | _filled("", whole(record), Rollout)
        for name, hint in (("iteration", int), ("id", str)):
            _check(name, made.get(name, hint()), hint)
        for place, row in enumerate(made["rows"]):
            for name in TOLD.keys() & row.keys():
                _check(f"rows[{place}].{name}", row[name], TOLD[name])
        return made
    except _WrongFormError as error:
        raise DataError(
            f"{where}: not a rollout as `lightning-rl rollout` writes it: {error}; restore the "
            "file, or remove the line"
        ) from error


def whole(record: Record) -> Record:
    """A rollout's record whose rows hold what they leave to the rollout.

    What is malformed stays as it is, to be refused.
    """
    rows = record.get("rows")
    if not isinstance(rows, list):
        return dict(record)
    return record | {
        "rows": [_whole_row(row, record) if isinstance(row, dict) else row for row in rows]
    }


def _whole_row(row: Record, record: Record) -> Record:
    """A row with what it leaves to its rollout: the prompt's tokens, and sampling settings."""
    row, prompt, settings = dict(row), record.get("prompt"), record.get("sampling")
    if row.get("prompt_ids", ()) is None and isinstance(prompt, dict):
        row["prompt_ids"] = prompt.get("token_ids")
    if isinstance(row.get("sampling"), dict) and isinstance(settings, dict):
        row["sampling"] = settings | row["sampling"] if row["sampling"] else None
    return row


def shortened(value: Any) -> str:
    """A value as Python writes it, as far as a line of a message has place for it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:57]}..."


class _WrongFormError(Exception):
    """What a field holds that it cannot."""


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _filled(where: str, record: Any, kind: type) -> Record:
    """A dataclass's record; what has a default may be missing."""
    if not isinstance(record, dict):
        raise _WrongFormError(f"{where.rstrip('.')} is no object but {shortened(record)}")
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
    """The value if it has the form of its annotation, with what its records leave out."""
    if get_origin(hint) in (Union, UnionType):
        for choice in get_args(hint):
            if _is_of(value, choice):
                return _check(name, value, choice)
        raise _WrongFormError(f"{name} is {shortened(value)}, and must be {_said(hint)}")
    if not _is_of(value, hint):
        raise _WrongFormError(f"{name} is {shortened(value)}, and must be {_said(hint)}")
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _filled(f"{name}.", value, hint)  # type: ignore[arg-type]  # a class, not one made
    if origin is list:
        return _check_items(name, value, arguments[0])
    if origin is dict and arguments[1] is not Any:
        return {key: _check(f"{name}[{key!r}]", item, arguments[1]) for key, item in value.items()}
    if hint is int and not -LARGEST <= value < LARGEST:
        raise _WrongFormError(f"{name} is {shortened(value)}, and must have 64 bits")
    return value


def _check_items(name: str, values: list[Any], item: Any) -> list[Any]:
    if item is int and set(map(type, values)) <= {int}:  # at once: there are many tokens
        if values and not (min(values) >= -WIDTH and max(values) < WIDTH):
            wrong = next(v for v in values if not -WIDTH <= v < WIDTH)
            raise _WrongFormError(f"{name} holds {shortened(wrong)}, and must have 32 bits")
        return values
    if item in (bool, float) and set(map(type, values)) <= ({bool} if item is bool else {float}):
        return values
    return [_check(f"{name}[{place}]", value, item) for place, value in enumerate(values)]


def _is_of(value: Any, hint: Any) -> bool:
    """Whether JSON that stands for this annotation looks like this, from outside."""
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
