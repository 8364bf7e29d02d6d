"""Hydra's overrides, ``+name=value``, ``~name``, by its own grammar, which differs from YAML."""

import re
from collections.abc import Iterable
from typing import Any

from lightning_rl.errors import ConfigError

_NAME = re.compile(r"(\+\+|\+|~)?([\w@./:\-]+)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"null": None, "true": True, "false": False}
_SWEEP = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list)\(")
_DEEPEST = 20


def parse_overrides(lines: Iterable[str]) -> dict[str, Any]:
    """Return the values of overrides by name; the last one of a name wins, ``~name`` removes it.

    Raises:
        ConfigError: for a text that is not an override, or an override for several runs.
    """
    values: dict[str, Any] = {}
    for line in lines:
        match = _NAME.fullmatch(line.strip())
        if match is None or (match[3] is None and match[1] != "~"):
            raise ConfigError(f"{line[:80]!r} is not an override of the form name=value")
        if match[1] == "~":
            values.pop(match[2], None)
        else:
            values[match[2]] = parse_value(match[3], line)
    return values


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
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text) and len(text) < 300:  # an integer of thousands is refused by int()
        return float(text) if re.search(r"[.eE]", text) else int(text)
    return text


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
        escaped = character == "\\" and not escaped
        if character == at and not opened and not quote:
            parts.append("")
        else:
            parts[-1] += character
        if opened < 0:
            break
    if opened or quote:
        raise ConfigError(f"{line[:80]!r}: brackets or quotes do not close")
    return parts if len(parts) > 1 or parts[0].strip() else []
