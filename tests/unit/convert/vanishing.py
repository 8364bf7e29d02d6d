"""Find what a conversion makes of one key, whatever is written for it."""

import contextlib
from collections.abc import Callable
from typing import Any

from lightning_rl.convert.conversion import Conversion, ParameterRow
from lightning_rl.errors import ConfigError


def vanished(
    convert: Callable[[dict[str, Any]], Conversion],
    start: dict[str, Any],
    name: str,
    values: tuple[Any, Any],
) -> list[Any]:
    """Return which of two values of a key are neither in the result nor named.

    Two values are in the result if it differs by them. An ellipsis is what
    ``start`` has.
    """
    done = {}
    for place, value in enumerate(values):
        with contextlib.suppress(ConfigError):  # a refusal names what it refuses
            done[place] = convert(start | ({} if value is ... else {name: value}))
    if len(done) < 2 or done[0].config != done[1].config:
        return []
    pairs = zip(values, done.values(), strict=True)
    return [value for value, result in pairs if value is not ... and not names(result, name)]


def as_written(row: ParameterRow) -> Any:
    """Return a parameter's default, as one writes it; null is what nobody writes."""
    return ... if row.default is None else row.default


def names(done: Conversion, name: str) -> bool:
    """Tell whether the notes name a key."""
    told = [*(item.key for item in done.left), *done.missing, *done.remarks]
    return any(name in text for text in told)
