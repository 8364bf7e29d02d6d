"""``--trusted_only``: untrusted configurations, which may name no code outside trusted modules."""

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.cli.trusted_texts import require_safe_texts
from lightning_rl.config import names
from lightning_rl.config.hints import import_object
from lightning_rl.config.layers import Key, name_of
from lightning_rl.errors import ConfigError

_HARMLESS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""The keys, by their mapping's name, that run no code whatever their values are."""
_SENDS = {"OpenAIJudge", "OpenAIChat"}
"""Classes whose options are only sent to a server."""
_HERE = {"auto", "local", "127.0.0.1", "localhost", "[::1]"}


def require_harmless(tree: Any, place: str = "") -> None:
    """Refuse arguments through which a trusted class would run untrusted code.

    Raises:
        ConfigError: naming the key, the value and the reason.
    """
    for key, value, owner in _nodes(tree, (), ""):
        reason = _reason(key[-1] if key else "", value, owner)
        if reason:
            raise ConfigError(f"{place}{name_of(key)}: {reason}; leave it out")
    for key, value, owner in _nodes(tree, (), ""):
        known = _HARMLESS.get(str(key[-1])) if key else None
        if known is None or not isinstance(value, dict):
            continue
        if "class_path" in value or owner in _SENDS:
            continue
        for stray in sorted(map(str, value.keys() - set(known))):
            raise ConfigError(
                f"{place}{name_of((*key, stray))}: {value[stray]!r:.60} may run code, as it is "
                f"not one of the keys known to be safe ({', '.join(sorted(known))}); leave it out"
            )


def as_parsed(value: Any) -> Any:
    """Convert a value as the parser does: texts may hold lists, mappings and switches as YAML."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        return value


def _reason(name: Any, value: Any, owner: str) -> str | None:
    """Return the reason why a value is not allowed; None if it is."""
    if name == "trust_remote_code" and value:
        return f"{value!r} runs code that comes with a model"
    if name == "weights_only" and value is False:
        return "false unpickles objects, which runs code"
    if name == "ckpt_path" and "://" in str(value):
        return f"{value!r} would be unpickled, which runs code; download it, and pass the file"
    if name == "sandbox" and owner == "PythonTests" and value is False:
        return "false runs code of the model, or of the data's tests, unprotected"
    if name == "address" and value and not {str(value), str(value).rpartition(":")[0]} & _HERE:
        return f"{value!r}: a Ray cluster can run any code in its drivers"
    return None


def _nodes(node: Any, key: Key, owner: str) -> Iterator[tuple[Key, Any, str]]:
    """Yield all nodes, with the last part of the nearest enclosing class_path."""
    node = as_parsed(node)
    yield key, node, owner
    if isinstance(node, dict) and "class_path" in node:
        owner = str(node["class_path"]).rpartition(".")[2]
    for path, inner in _children(node, key):
        yield from _nodes(inner, path, owner)


def _children(node: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yield the parts of a mapping or list, each with its key."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(node, dict):
        parts = node.items()
    elif isinstance(node, list | tuple):
        parts = enumerate(node)
    return (((*key, name), inner) for name, inner in parts)


TRUSTED = ("lightning_rl", "lightning.pytorch", "torch.optim")
"""Modules whose classes are always allowed: public names, and parts of a Trainer or optimizer."""
_KINDS = {
    "lightning.pytorch": (
        Callback, Accelerator, Logger, CheckpointIO, ClusterEnvironment, LayerSync, Precision,
        Profiler, Strategy,
    ),
    "torch.optim": (Optimizer, LRScheduler),
}  # fmt: skip
"""Classes of a module that may be named."""
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"  # which Lightning notes in checkpoints


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments without ``--trusted_only`` and ``--trust MODULE``, and the trusted
    modules.

    These are None if neither was given: everything is trusted.

    Raises:
        ConfigError: if ``--trust`` has no module name.
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
    """Refuse names of other code before anything is imported.

    Every text in the tree that could be an import path counts as one: it consists of two or more
    names with dots between them, and Python finds a module of the first name. It must then be a
    public name of this library, a part of Lightning's Trainer, an optimizer or scheduler of torch,
    or be defined in a module that ``--trust`` adds.

    Args:
        tree: a configuration, or hyper-parameters of a checkpoint.
        trusted: modules, :data:`TRUSTED` first.
        place: where the tree comes from, for the message.

    Raises:
        ConfigError: naming the key, the value, and how to trust it.
    """
    for key, value in _texts(tree, ()):
        where = f"{place}{name_of(key)}"
        if value.endswith((".yaml", ".yml")) and os.path.isfile(value):
            raise ConfigError(
                f"{where}: {value!r} is a separate configuration file, which is not checked; pass "
                "it with --config"
            )
        instantiator = key[-1:] == ("_instantiator",) and value == _INSTANTIATOR
        if _is_import_path(value) and not instantiator and not _is_trusted(value, trusted):
            raise _refusal(where, value, trusted)
    require_harmless(tree, place)


def require_trusted_parts(
    config: Any, trusted: Sequence[str], owners: Mapping[str, type] | None = None
) -> None:
    """Refuse classes that short names resolved to, and texts that such a class may run.

    Args:
        config: the parsed configuration.
        trusted: modules, :data:`TRUSTED` first. Classes of a module that ``--trust`` added may be
            given any text.
        owners: classes whose arguments a key of the configuration holds.

    Raises:
        ConfigError: naming the key, the value, and how to trust it.
    """
    for key, value in _texts(config, ()):
        if key and key[-1] == "class_path" and "." in value and not _is_trusted(value, trusted):
            raise _refusal(name_of(key), value, trusted)

    def is_trusted(path: str) -> bool:
        return _is_trusted(path, trusted)

    def is_added(kind: type) -> bool:
        return any(_within(kind.__module__, module) for module in trusted[len(TRUSTED) :])

    require_safe_texts(config, None, (), is_trusted, is_added)
    for name, owner in (owners or {}).items():
        require_safe_texts(config[name], owner, (name,), is_trusted, is_added)


def _refusal(where: str, value: str, trusted: Sequence[str]) -> ConfigError:
    inside = next((module for module in TRUSTED if _within(value, module)), None)
    if inside is not None:
        return ConfigError(
            f"{where}: {value!r} is not among the trusted modules' public classes ({inside} holds "
            "it, or imports it, but not for use in configurations); leave it out"
        )
    return ConfigError(
        f"{where}: {value!r} is not among the trusted modules ({', '.join(trusted)}); read "
        f"its code, then add --trust {value.strip().split('.')[0]}"
    )


def _texts(node: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """Yield all texts, also inside texts that the parser would read as YAML."""
    for path, inner in _children(node, key):
        yield from _texts(inner, path)
    if isinstance(node, str):
        yield key, node
        if (parsed := as_parsed(node)) != node:
            yield from _texts(parsed, key)


def _is_import_path(text: str) -> bool:
    parts = text.strip().split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return False
    if os.path.exists(f"{parts[0]}.py") or os.path.exists(os.path.join(parts[0], "__init__.py")):
        return True  # which --trust would find
    # Nothing is imported to find this out: all finders are asked, as an import would.
    try:
        return parts[0] in sys.modules or find_spec(parts[0]) is not None
    except (ImportError, ValueError):
        return True


def _is_trusted(path: str, trusted: Sequence[str]) -> bool:
    """Return True if a path names something that a trusted module defines, not something it
    imported.
    """
    module = next((module for module in trusted if _within(path, module)), None)
    if module is None or not _stays_inside(path):
        return False
    found = import_object(path)  # which only imports what is trusted
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return False
    if module == "lightning_rl":
        name = found.__name__
        known = name in names.MODULE_OF or name in names.added()
        return known and found is names.public(name)
    if module in _KINDS:
        return inspect.isclass(found) and issubclass(found, _KINDS[module])
    return any(_within(found.__module__, other) for other in trusted[len(TRUSTED) :])


def _stays_inside(path: str) -> bool:
    """Return True if no step of a path leads into another module, as ``pool.os`` does."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        module = ".".join(parts[:end])
        imported = sys.modules.get(module) or import_object(module) if end > 1 else None
        if inspect.ismodule(imported) and imported.__name__ != module:
            return False
    return True


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
