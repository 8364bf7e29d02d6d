"""Schemas: whether what came over a network or from a disk has the form that it should have."""

import json
from typing import Any, TypeVar

from lightning_rl.errors import ConfigError

T = TypeVar("T")
_ADAPTERS: dict[type, Any] = {}
"""pydantic's validators; to make one takes longer than to use it."""


class SchemaError(ValueError):
    """A text is no JSON, or has not the form that was expected; says where, in one line."""


def require_pydantic(who: str) -> None:
    """Check that schemas can be held against anything.

    Raises:
        ConfigError: naming who needs pydantic, and how it is installed.
    """
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{who} checks what it reads with pydantic, which is not installed; "
            "`pip install 'pydantic>=2.12'`"
        ) from error


def parsed(kind: type[T], text: str) -> T:
    """What a JSON text says, as a (data)class says it; fields that the class has not are ignored.

    Raises:
        SchemaError: naming the first field that is missing, or of another type.
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
        where = ".".join(map(str, fault["loc"])) or "all of it"
        raise SchemaError(f"{where}: {fault['msg'][:1].lower()}{fault['msg'][1:]}") from error
    return checked


def one_line(text: object, limit: int = 300) -> str:
    """A text of somebody else's, fit for a message: a line, not too long, nothing but characters.

    A terminal obeys escapes, and a log takes a line break for a new entry.
    """
    words = " ".join(str(text)[: 10 * limit].split())
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
