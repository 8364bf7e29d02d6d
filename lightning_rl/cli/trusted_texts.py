"""Which arguments may hold a text under ``--trusted_only``: only those that are listed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml  # type: ignore[import-untyped]

from lightning_rl.config.hints import branches, classes, import_object, parameters
from lightning_rl.config.layers import Key, name_of
from lightning_rl.errors import ConfigError

TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""The arguments of each class that may hold texts, by kind of text."""
KINDS = tuple(kind for kind in TABLE if kind != "records")


def require_safe_texts(
    config: Any,
    owner: type | None,
    place: Key,
    is_trusted: Callable[[str], bool],
    is_added: Callable[[type], bool],
) -> None:
    """Refuse texts in arguments that could be code or a command, or whose use is unknown.

    Args:
        config: the parsed configuration: every class has its ``class_path``, unless only one is
            possible.
        owner: the class whose arguments the mapping holds; None: it holds no class's arguments.
        place: the key of the mapping.
        is_trusted: returns True if an import path may be named.
        is_added: returns True if a class may be given any text, because the user read its code.

    Raises:
        ConfigError: naming the key, the value, and what it could do.
    """
    for key, component, name, text in _texts(config, place, owner, None):
        where = f"{name_of(key)}: {text!r:.60}"
        kind = "data" if is_added(component) else kind_of(component, name)
        if kind in ("data", "by_key", "choice"):
            continue
        if kind == "registered" and ":" not in text:
            continue
        if kind == "imported" and is_trusted(text):
            continue
        known = parameters(component).get(name)
        if known is not None and known.default == text:  # which the parser has filled in
            continue
        if kind == "code":
            reason = "may be run as code, or select code to run"
        elif kind == "registered":
            reason = "names a module to import before the colon"
        elif kind == "imported":
            reason = "would be imported, but is not among the trusted modules"
        else:
            reason = f"is a text, but {component.__name__}.{name} is not known to be safe for texts"
        raise ConfigError(
            f"{where} {reason}; leave it out, or read its code and run without --trusted_only"
        )


@cache
def kind_of(component: type, name: str) -> str | None:
    """Return an argument's kind, one of ``KINDS``; ``choice`` if its type allows no free text.

    None: unknown. A class's own entry takes precedence over those of its bases.
    """
    for base in inspect.getmro(component):
        for kind in KINDS:
            if name in TABLE[kind].get(base.__name__, ()):
                return kind
    known = parameters(component).get(name)
    if known is None or takes_text(known.annotation):
        return "imported" if known is not None and _takes_function(known.annotation) else None
    return "choice"


_OBJECTS = ("lightning_rl", "lightning", "torch", "transformers", "datetime")
"""Packages whose classes' instances an argument takes, which no text can stand for."""


def takes_text(hint: Any) -> bool:
    """Return True if a hint accepts a free text: neither for an object nor one of given choices."""
    if len(branches(hint)) > 1:
        return any(map(takes_text, branches(hint)))
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (bool, int, float, NoneType) or origin is Literal:
        return False
    if _is_callable(hint):  # what it makes is looked at by itself; a function has no class
        return not classes(hint)
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        of_items = arguments[1:] if issubclass(origin, Mapping) else arguments
        return any(takes_text(inner) for inner in of_items if inner is not Ellipsis)
    if inspect.isclass(hint):
        return not issubclass(hint, Enum) and hint.__module__.split(".")[0] not in _OBJECTS
    return True


def _takes_function(hint: Any) -> bool:
    """Return True if a hint accepts the import path of a function, or a list of some."""
    inner = [part for branch in branches(hint) for part in (branch, *get_args(branch))]
    return any(map(_is_callable, inner))


def _is_callable(hint: Any) -> bool:
    return get_origin(hint) is Callable


def _texts(
    node: Any, key: Key, owner: type | None, name: str | None
) -> Iterator[tuple[Key, type, str, str]]:
    """Yield every text in an argument: its key, its class, the argument's name, and the text.

    ``name`` is the argument of ``owner`` that the node is part of; None: the node is the mapping of
    all arguments.
    """
    if isinstance(node, str):
        if owner is not None and name is not None:
            yield key, owner, name, node
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _texts(value, (*key, index), owner, name)
    elif isinstance(node, Mapping) and "class_path" in node:
        made = import_object(node["class_path"])
        for part in ("init_args", "dict_kwargs"):
            given = node.get(part) or {}
            yield from _arguments(given, (*key, part), made if inspect.isclass(made) else None)
    elif isinstance(node, Mapping):
        inside = None if owner is None else _only_class(owner, name)
        if inside is not None or name is None:
            yield from _arguments(node, key, inside or owner)
        else:
            for inner, value in node.items():
                yield from _texts(value, (*key, inner), owner, name)


def _arguments(
    given: Mapping[str, Any], key: Key, owner: type | None
) -> Iterator[tuple[Key, type, str, str]]:
    for name, value in given.items():
        yield from _texts(value, (*key, name), owner, None if owner is None else name)


def _only_class(owner: type, name: str | None) -> type | None:
    """Return the class whose arguments a mapping without ``class_path`` holds, if only one is
    possible.
    """
    known = parameters(owner).get(name) if name is not None else None
    found = classes(known.annotation) if known is not None else []
    return found[0] if len(found) == 1 else None
