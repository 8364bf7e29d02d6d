"""Kinds of values that another library's parameters take, and reading values as these."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from lightning_rl.errors import ConfigError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_KIND = re.compile(r"(\w+?)(?:(>=|>)(\d+))?")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def kind_of(default: Any) -> str:
    """Return the kind of a parameter whose table names none, from its default."""
    kinds = ((bool, "flag"), (int, "integer"), (float, "number"), (str, "text"), (list, "texts"))
    return next((kind for cls, kind in kinds if isinstance(default, cls)), "any")


def read_as(kind: str, name: str, value: Any) -> Any:
    """Read a non-null value as ``kind``, which may have a bound: ``integer>=1``.

    Numbers and flags may be given as text, as quoted JSON values and YAML's 1e-6 are.

    Raises:
        ConfigError: names the parameter, its value and what it takes.
    """
    match = _KIND.fullmatch(kind)
    assert match is not None, kind
    base, sign, bound = match.groups()
    read, what = _READERS[base]
    try:
        result = read(value)
        refused = sign is not None and not _SIGNS[sign](result, int(bound))
    except (ValueError, TypeError, OverflowError, RecursionError):
        refused = True
    if refused:
        limit = f" {sign} {bound}" if sign else ""
        unread = isinstance(value, str) and "$" in value  # a number of GPUs of Slurm's, say
        fix = ", and only a run of the script would tell which; write it there" if unread else ""
        raise ConfigError(f"{name}={_short(value)}: it takes {what}{limit}{fix}")
    return result


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value) if re.search(r"[.eE]", value) else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return value


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _text(value: Any) -> str:
    if value is False:  # YAML's no
        return "no"
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
        raise ValueError
    return str(value)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def read_list(value: Any) -> list[Any]:
        if isinstance(value, Mapping):
            raise ValueError
        return [read(item) for item in (value if isinstance(value, list | tuple) else [value])]

    return read_list


def _texts(value: Any) -> list[str] | str:
    """Read texts; a single text stays one, since it is a pattern where a list would hold names."""
    return _text(value) if isinstance(value, str) else _list_of(_text)(value)


def _mapping(value: Any) -> dict[str, Any]:
    """Read a mapping, which TRL also takes as JSON."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ValueError
    return dict(found)


def _threshold(value: Any) -> str | float:
    """Read a positive number, or two as ``low_high``."""
    bounds = value.split("_") if isinstance(value, str) else [value]
    numbers = [_number(bound) for bound in bounds]
    if len(numbers) > 2 or min(numbers) <= 0 or sorted(numbers) != numbers:
        raise ValueError
    return value if len(numbers) == 2 else numbers[0]


def _thresholds(value: Any) -> str | float:
    """Read one threshold, or several estimates' separated by commas."""
    parts = value.split(",") if isinstance(value, str) else [value]
    read = [_threshold(part) for part in parts]
    return value if len(read) > 1 else read[0]


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SIGNS = {">=": operator.ge, ">": operator.gt}
_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "any": (lambda value: value, "anything"),
    "flag": (_flag, "true or false"),
    "integer": (_integer, "a whole number"),
    "number": (_number, "a number"),
    "numbers": (_list_of(_number), "a list of numbers"),
    "text": (_text, "a text"),
    "texts": (_texts, "a text or a list of texts"),
    "mapping": (_mapping, "names and values"),
    "tables": (_list_of(_mapping), "a list of tables"),
    "threshold": (_threshold, "a number > 0, or two as low_high"),
    "thresholds": (_thresholds, "a number > 0, or two as low_high"),
}
