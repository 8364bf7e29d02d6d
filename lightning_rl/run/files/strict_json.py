"""JSON as its standard has it: what is read can be stored and computed with, by any program."""

import json
import math
from typing import Any

DEEPEST = 64
"""Deepest nesting of objects and arrays; functions that copy a record recurse as deep."""


def loads(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: if it is not valid JSON, or only Python would read it: NaN and infinities,
            numbers beyond float64, half a surrogate pair, nesting beyond ``DEEPEST``.
    """
    try:
        value = json.loads(
            text, parse_float=_finite, parse_int=_whole, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    require_plain(value)
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Return valid JSON, in which NaN and infinities are null."""
    return json.dumps(_nulled(value), indent=indent, allow_nan=False)


def require_plain(value: Any) -> None:
    """Refuse values, nested in objects and arrays, that cannot be stored.

    Raises:
        ValueError: as :func:`loads` does.
    """
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _require_text(item)
            elif isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level, depth = inner, depth + 1


def _nulled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulled(part) for key, part in value.items()}
    return [_nulled(part) for part in value] if isinstance(value, list | tuple) else value


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{half} is half a surrogate pair, not a character") from error


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.20}... is beyond float64 (1.8e308)")
    return number


def _whole(digits: str) -> int:
    if len(digits) > 300:  # far below what Python refuses to read
        _finite(digits)
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON; write a finite number or null")
