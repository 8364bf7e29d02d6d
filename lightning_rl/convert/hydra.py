"""Hydra's overrides, ``+name=value``, ``~name``, by its own grammar, which differs from YAML."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightning_rl.errors import ConfigError

_NAME = re.compile(r"(\+\+|\+|~)?([\w@./:\-]+)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"null": None, "true": True, "false": False}
_SWEEP = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list)\(")
_CAST = re.compile(r"(int|float|str|bool|json_str)\((.*)\)", re.DOTALL)
_CASTS: dict[str, Callable[[Any], Any]] = {
    "int": int, "float": float, "str": str, "json_str": json.dumps,
    "bool": lambda value: value if isinstance(value, bool) else bool(float(value)),
}  # fmt: skip
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=,\s])")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")
_DEEPEST = 20


def flat(values: dict[str, Any], prefix: str = "", whole: Collection[str] = ()) -> dict[str, Any]:
    """Join nested names by dots, but below those of ``whole``, whose values stay mappings."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in whole:
            result |= flat(value, f"{path}.", whole)
        else:
            result[path] = value
    return result


def parse_overrides(lines: Iterable[str], start: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the values by name, nested ones joined by dots, that overrides make of ``start``.

    The last one of a name wins. ``~name`` removes it, and what is below it, and is kept as
    ``~name``: it may also remove what a configuration that is not here has.

    Raises:
        ConfigError: for a text that is not an override, or an override for several runs.
    """
    values = dict(start or {})
    for line in lines:
        match = _NAME.fullmatch(line.strip())
        if match is None or (match[3] is None and match[1] != "~"):
            raise ConfigError(f"{line[:80]!r} is not an override of the form name=value")
        sign, name, text = match.groups()
        if sign == "~":
            values = {n: v for n, v in values.items() if not f"{n}.".startswith(f"{name}.")}
            values[f"~{name}"] = text
            continue
        for path, value in flat({name: parse_value(text, line)}).items():
            values.pop(path, None)  # so that it comes after what it replaces
            values[path] = value
    return values


def resolved(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with ``${name}`` and ``${oc.select:name,default}`` put in.

    What refers to an unknown name, or to itself, stays as it is.
    """
    known = {**defaults, **values}

    def put_in(value: Any, depth: int = 0) -> Any:
        if isinstance(value, list):
            return [put_in(item, depth) for item in value]
        if not isinstance(value, str) or depth > _DEEPEST:
            return value

        def found(match: re.Match[str]) -> Any:
            if match[1] in known:
                return put_in(known[match[1]], depth + 1)
            return match[0] if match[2] is None else _value(match[2], match[0], 0)

        if whole := _REFERENCE.fullmatch(value):
            return found(whole)
        return _REFERENCE.sub(lambda match: str(found(match)), value)

    return {name: put_in(value) for name, value in values.items()}


def parse_value(text: str, line: str) -> Any:
    """Parse the text right of ``=``: a number, true, null, a text, a list, or a mapping.

    Raises:
        ConfigError: for several values (a sweep), and for brackets or quotes that do not close.
    """
    text = text.strip()
    if _SWEEP.match(text) or len(split(text, line)) > 1:
        raise ConfigError(f"{line[:80]!r} has several values, which is a sweep; keep one")
    return _value(text, line, 0)


def _value(text: str, line: str, depth: int) -> Any:
    text = text.strip()
    if depth > _DEEPEST:
        raise ConfigError(f"{line[:80]!r} is more than {_DEEPEST} levels deep")
    if text.startswith("[") and text.endswith("]"):
        return [_value(item, line, depth + 1) for item in split(text[1:-1], line)]
    if text.startswith("{") and text.endswith("}"):
        pairs = [split(item, line, ":") for item in split(text[1:-1], line)]
        if any(len(pair) < 2 for pair in pairs):
            raise ConfigError(f"{line[:80]!r}: names and values in braces are written {{a:1,b:2}}")
        # A value may hold colons of its own.
        return {
            str(_value(name, line, depth + 1)): _value(":".join(rest), line, depth + 1)
            for name, *rest in pairs
        }
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if cast := _CAST.fullmatch(text):
        try:
            return _CASTS[cast[1]](_value(cast[2], line, depth + 1))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{line[:80]!r}: {cast[2]} is no {cast[1]}") from error
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text) and len(text) < 300:  # an integer of thousands is refused by int()
        return float(text) if re.search(r"[.eE]", text) else int(text)
    return _ESCAPED.sub(r"\1", text)


def split(text: str, line: str, at: str = ",") -> list[str]:
    """Split a text at separators outside quotes and brackets; an empty text has no parts.

    Raises:
        ConfigError: if quotes or brackets do not close.
    """
    parts, opened, quote, escaped = [""], 0, "", False
    for character in text:
        if escaped or quote:
            closes = character == quote and not escaped
            quote = "" if closes else quote
        elif character in "'\"" and not parts[-1].strip():  # within a word it is an apostrophe
            quote = character
        opened += 0 if quote or escaped else (character in "[{(") - (character in "]})")
        if character == at and not opened and not quote and not escaped:
            parts.append("")
        else:
            parts[-1] += character
        escaped = character == "\\" and not escaped
        if opened < 0:
            break
    if opened or quote:
        raise ConfigError(f"{line[:80]!r}: brackets or quotes do not close")
    return parts if len(parts) > 1 or parts[0].strip() else []
