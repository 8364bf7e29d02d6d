"""Schemas: check that data from a network or a disk has the expected form."""

import json
from typing import Any, TypeVar

from lightning_rl.errors import ConfigError

T = TypeVar("T")
_ADAPTERS: dict[type, Any] = {}
"""pydantic's validators, cached since making one takes longer than using it."""


class SchemaError(ValueError):
    """A text is not valid JSON, or not of the expected form; says where, in one line."""


def require_pydantic(who: str) -> None:
    """Check that pydantic is installed.

    Raises:
        ConfigError: names who needs pydantic, and how to install it.
    """
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{who} checks what it reads with pydantic, which is not installed; "
            "`pip install 'pydantic>=2.12'`"
        ) from error


def parsed(kind: type[T], text: str) -> T:
    """Parse a JSON text into a (data)class; fields that the class lacks are ignored.

    Raises:
        SchemaError: names the first field that is missing or of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"no JSON ({error})") from error
    try:
        checked: T = _ADAPTERS[kind].validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the whole text"
        raise SchemaError(f"{where}: {fault['msg'][:1].lower()}{fault['msg'][1:]}") from error
    return checked


def one_line(text: object, limit: int = 300) -> str:
    """Make a foreign text fit for a message: one line of limited length, printable characters only.

    Terminals obey escapes, and a line break would start a new log entry.
    """
    words = " ".join(str(text)[: 10 * limit].split())
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
