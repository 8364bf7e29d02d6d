"""``--trusted_only``: configurations of strangers, which may name no code but what is trusted."""

import inspect
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

from lightning_rl.cli.hints import import_object
from lightning_rl.cli.sources import Key, name_of
from lightning_rl.errors import ConfigError

TRUSTED = ("lightning_rl", "lightning.pytorch", "torch.optim")
"""Modules whose classes a configuration may name in any case."""


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The arguments without ``--trusted_only`` and ``--trust MODULE``, and what is trusted then.

    None: everything, as neither was given.

    Raises:
        ConfigError: for ``--trust`` without a module's name.
    """
    rest, trusted, only = [], list(TRUSTED), False
    words = iter(arguments)
    for word in words:
        if word == "--trusted_only":
            only = True
        elif word == "--trust" or word.startswith("--trust="):
            only = True
            name = next(words, "") if word == "--trust" else word.partition("=")[2]
            if not name or not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(
                    f"--trust needs a module's name, such as my_rewards; got {name!r}"
                )
            trusted.append(name)
        else:
            rest.append(word)
    return rest, trusted if only else None


def require_trusted(tree: Any, trusted: Sequence[str], place: str = "") -> None:
    """Refuse what would run other code, before anything is imported.

    Every text in the tree that could be an import path is one: it has two names or more with dots
    between them, and the first is an importable module's.

    Args:
        tree: a configuration, or hyper-parameters of a checkpoint.
        trusted: modules; what is in them or below them may be named.
        place: where the tree comes from, for the message.

    Raises:
        ConfigError: naming the key, the value, and how to trust it.
    """
    for key, value in _texts(tree, ()):
        where = f"{place}{name_of(key)}"
        if key and key[-1] == "trust_remote_code" and value:
            raise ConfigError(f"{where}: {value!r} runs code that comes with a model; leave it out")
        if key and key[-1] == "weights_only" and value is False:
            raise ConfigError(f"{where}: false unpickles objects, which runs code; leave it out")
        if not isinstance(value, str):
            continue
        if value.endswith((".yaml", ".yml")) and Path(value).is_file():
            raise ConfigError(
                f"{where}: {value!r} is a configuration of its own, which is not looked into; give "
                "it with --config"
            )
        if _is_import_path(value) and not _is_trusted(value, trusted):
            module = value.split(".")[0]
            raise ConfigError(
                f"{where}: {value!r} is not among the trusted modules ({', '.join(trusted)}); read "
                f"its code, then add --trust {module}. A path is none with ./ before it"
            )


def _texts(node: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """All leaves."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _texts(inner, (*key, name))
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from _texts(inner, (*key, index))
    else:
        yield key, node


def _is_import_path(text: str) -> bool:
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return False
    # Nothing is imported to find this out.
    finders = (BuiltinImporter, FrozenImporter, PathFinder)
    return any(finder.find_spec(parts[0]) is not None for finder in finders)


def _is_trusted(path: str, trusted: Sequence[str]) -> bool:
    """Whether it names something that a trusted module defines, and not what it has imported."""
    if not any(_within(path, module) for module in trusted):
        return False
    found = import_object(path)  # which only imports what is trusted
    owner = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None)
    if isinstance(found, types.MethodType) or owner is None:
        return False
    return any(_within(owner, module) for module in trusted)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
