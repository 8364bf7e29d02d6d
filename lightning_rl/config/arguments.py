"""Constructors accept in Python what a configuration may contain, with the same error messages."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from os import PathLike
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints, overload

import torch

from lightning_rl.config.hints import (
    branches,
    classes,
    item_hint,
    mapping_hint,
    parse,
    supplied_arguments,
)
from lightning_rl.config.layers import name_of
from lightning_rl.errors import ConfigError

Class = TypeVar("Class", bound=type)
Converter = Callable[[Any], Any]


@overload
def configurable(cls: Class, /) -> Class: ...
@overload
def configurable(**convert: Converter) -> Callable[[Class], Class]: ...
def configurable(cls: Any = None, /, **convert: Converter) -> Any:
    """Class decorator: check the arguments of ``__init__`` against its annotations.

    A value that does not match its annotation is read as in a configuration: the name of a class,
    ``{"class_path": ..., "init_args": ...}``, the arguments of a dataclass, or the import path of a
    function. In addition, numpy numbers become Python's, paths become strings, a class that needs
    no arguments becomes an instance, and a single object becomes a list of it.

    Args:
        cls: the class.
        convert: a function to apply first, per argument name.

    Raises:
        ConfigError: when the class is called, with the message of ``lightning-rl``.
    """
    if cls is None:
        return lambda cls: _checked(cls, convert)
    return _checked(cls, convert)


def _checked(cls: Class, convert: Mapping[str, Converter]) -> Class:
    init = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            from lightning_rl.config.mistakes import check_names

            check_names(type(self), args, kwargs)  # of what else is wrong, Python tells
            raise
        hints = _hints(init)
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if value is parameter.default or name not in hints:
                continue
            if name in convert:
                value = convert[name](value)
            key = f"{type(self).__name__}.{name}"
            bound.arguments[name] = _taken(value, hints[name], parameter.default, (key,))
        init(*bound.args, **bound.kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@cache
def _hints(init: Callable[..., None]) -> dict[str, Any]:
    """Return annotations of named parameters; the base class checks those of ``**options``."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = {name: p.kind for name, p in inspect.signature(init).parameters.items()}
    hints = get_type_hints(init)
    return {name: h for name, h in hints.items() if name in kinds and kinds[name] not in variable}


def _taken(value: Any, hint: Any, default: Any, key: tuple[str | int, ...]) -> Any:
    """Return the value as the annotation requires it.

    Raises:
        ConfigError: if it cannot be converted.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's or torch's number
        value = value.item()
    if isinstance(value, Mapping) and classes(inside := mapping_hint(hint)):
        return {name: _taken(v, inside, None, (*key, name)) for name, v in value.items()}
    if _fits(value, hint):
        return value
    if isinstance(value, PathLike | torch.dtype) and str in branches(hint):
        return str(value).removeprefix("torch.")
    item = item_hint(hint)
    if item is not None and isinstance(value, list | tuple):
        return [_taken(v, item, None, (*key, i)) for i, v in enumerate(value)]
    named = mapping_hint(hint)
    if named is not None and isinstance(value, Mapping) and not classes(hint):
        return {name: _taken(v, named, None, (*key, name)) for name, v in value.items()}
    if item is not None and (classes(item) or callable(value)) and _fits(value, item):
        return [value]
    if value is None and default is None:
        return None
    if supplied_arguments(hint) and isinstance(value, tuple(classes(hint))):
        raise ConfigError(
            f"{name_of(key)}: expected a class or function that makes one, such as "
            f"{type(value).__name__}, got an instance"
        )
    return _made(value, hint, default, key)


def _made(value: Any, hint: Any, default: Any, key: tuple[str | int, ...]) -> Any:
    """Convert a value as the parser of configurations does."""
    from lightning_rl.config.mistakes import check_value, innermost

    if inspect.isclass(value) and issubclass(value, tuple(classes(hint))):
        return value()
    value = check_value(value, hint, default, key)
    try:
        return parse(hint, value)
    except Exception as error:  # a constructor refused its arguments
        raise innermost(error) from error


def _fits(value: Any, hint: Any) -> bool:
    """Return True if the value already matches the annotation, or if that cannot be checked."""
    return any(_fits_branch(value, branch) for branch in branches(hint))


def _fits_branch(value: Any, branch: Any) -> bool:
    origin, arguments = get_origin(branch), get_args(branch)
    if origin is Literal:
        return value in arguments
    if origin is Callable:
        return callable(value)
    if origin is type:
        return inspect.isclass(value) and issubclass(value, arguments)
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        if not isinstance(value, origin) or isinstance(value, str):
            return False
        if isinstance(value, Mapping) and len(arguments) == 2:
            return all(_fits(item, arguments[1]) for item in value.values())
        # Only what can be gone through twice is looked into.
        inside = value if isinstance(value, list | tuple) and len(arguments) == 1 else ()
        return all(_fits(item, arguments[0]) for item in inside)
    if not inspect.isclass(branch) or branch is Any or getattr(branch, "_is_protocol", False):
        return True
    if branch in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if branch is float else branch)
