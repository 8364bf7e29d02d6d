"""Options of a module in one mapping, where a fixture has some and a test adds others."""

from dataclasses import fields
from typing import Any

from lightning_rl import Loading, UpdateSettings


def grouped(**options: Any) -> dict[str, Any]:
    """The options with those of ``update`` and ``loading`` as a module takes them."""
    for argument, kind in (("update", UpdateSettings), ("loading", Loading)):
        names = [field.name for field in fields(kind) if field.name in options]
        if names:
            options[argument] = kind(**{name: options.pop(name) for name in names})
    return options
