"""``lightning-rl help``: the arguments of a class, as a configuration or script sets them."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from inspect import Parameter, getdoc, isclass
from textwrap import fill, indent
from typing import Any, NamedTuple

from lightning_rl.cli.process import CommandParser, printable
from lightning_rl.config.hints import did_you_mean, parameters
from lightning_rl.config.names import HOME, added, public
from lightning_rl.errors import ConfigError

WIDTH = 100


class Argument(NamedTuple):
    """An argument of a class; ``default`` is None if it is required."""

    name: str
    type: str
    default: str | None
    says: str


def arguments_of(cls: type) -> list[Argument]:
    """Return the arguments of a class in order, with those that it passes on to its bases.

    An argument that the class does not describe has the description of the nearest base that does.
    """
    return [
        Argument(
            name,
            _type(parameter.annotation),
            None if parameter.default is Parameter.empty else _default(_made(cls, parameter)),
            " ".join(_description(cls, name).split()),
        )
        for name, parameter in parameters(cls).items()
    ]


def _description(cls: type, name: str) -> str:
    described = (parameters(base)[name].doc for base in cls.__mro__ if name in _known(base))
    return next(filter(None, described), "")


def _known(base: type) -> dict[str, Any]:
    return {} if base is object else parameters(base)


def _made(cls: type, parameter: Any) -> Any:
    """Return the default, also of a dataclass's field that makes one for each instance."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    factories = {field.name: field.default_factory for field in fields}
    make = factories.get(parameter.name, dataclasses.MISSING)
    return parameter.default if make is dataclasses.MISSING else make()


def text_of(name: str) -> str:
    """Describe a class: its purpose, where to import it from, and its arguments.

    Raises:
        ConfigError: if no public class has this name.
    """
    cls = _class_called(name)
    home = f"from {HOME[name]} import {name}\n" if name in HOME else ""
    lines = [(getdoc(cls) or name).split("\n\n")[0], home]
    for argument in arguments_of(cls):
        given = "required" if argument.default is None else f"default: {argument.default}"
        lines.append(f"{argument.name}: {argument.type} ({given})")
        if argument.says:
            lines.append(indent(fill(argument.says.replace("``", ""), WIDTH - 4), " " * 4))
    return "\n".join(lines)


def _class_called(name: str) -> type:
    known = [*HOME, *added()]
    if name not in known:
        meant = did_you_mean(name, known)
        raise ConfigError(f"help: no class of this library is called {name!r}{meant}")
    result: Any = public(name)
    if not isclass(result) or issubclass(result, Exception):
        kind = "an error" if isclass(result) else "not a class"
        raise ConfigError(f"help: {name} is {kind}, so it has no arguments to configure")
    return result


_MODULE = re.compile(r"(?:\w+\.)+(?=\w)")


def _type(annotation: Any) -> str:
    if annotation is Parameter.empty:
        return "Any"
    plain = isclass(annotation) and not hasattr(annotation, "__args__")
    text = annotation.__name__ if plain else str(annotation)
    return _MODULE.sub("", text).replace("NoneType", "None")


def _default(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{k}={_default(v)}" for k, v in value.get("init_args", {}).items())
        name = value["class_path"].rpartition(".")[2]
        return f"{name}({arguments})" if arguments else name
    return value.__name__ if isclass(value) else repr(value)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser("help", "Show the arguments of classes of this library.")
    parser.add_argument("name", nargs="+", help="a class, such as PolicyModule")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the arguments of each named class; returns 0."""
    print(printable("\n\n".join(map(text_of, parse_arguments(arguments).name))))
    return 0
