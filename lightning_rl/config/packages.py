"""Commands and classes that installed packages add: found by their entry points."""

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_rl.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "lightning_rl.commands"
"""Group of commands: each names a :class:`~lightning_rl.extend.Command`."""
CLASSES = "lightning_rl.classes"
"""Group of classes: each has its class's name, by which alone a configuration may name it."""

OPTIONAL_COMMANDS = {"convert": "lightning_rl.convert"}
OPTIONAL_CLASSES = {
    "VerifiersAgent": "lightning_rl.verifiers",
    "VerifiersPrompts": "lightning_rl.verifiers",
}
"""What comes in this way although it is ours: the package that an installation may be without."""


@cache
def added(group: str, ours: frozenset[str]) -> dict[str, "EntryPoint"]:
    """The entry points of a group by name.

    The working directory is not searched: a stranger's folder could hold metadata that names code.

    Raises:
        ConfigError: if a package adds what is there already, by that name.
    """
    from importlib.metadata import distributions  # slow to import, and not needed by most

    path = [place for place in sys.path if place not in ("", os.getcwd())]
    adding = {p.name for p in distributions(path=path) if p.entry_points.select(group=group)}
    found: dict[str, EntryPoint] = {}
    for package in sorted(adding):
        # The first on the path is the one whose code is imported.
        first = next(iter(distributions(name=package, path=path)))
        for point in first.entry_points.select(group=group):
            if point.name in ours or point.name in found:
                other = "lightning_rl" if point.name in ours else _package(found[point.name])
                raise ConfigError(
                    f"the package {package} adds {point.name!r} ({group}), which {other} has "
                    "already; uninstall one of them, or have it renamed"
                )
            found[point.name] = point
    return found


def load(point: "EntryPoint") -> Any:
    """What an entry point names.

    Raises:
        ConfigError: naming the package, and why it cannot be imported.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # another's module, which may do anything
        raise ConfigError(
            f"{point.name!r} of the package {_package(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}; install the package anew, or uninstall it"
        ) from error


def _package(point: "EntryPoint") -> str:
    return point.dist.name if point.dist is not None else "of no name"


def lacking(package: str) -> str:
    """What to install for what is in an optional package of ours that is not there."""
    return (
        f"it is in {package}, an optional part that is not installed here: in a checkout that has "
        "it run `make setup` or `pip install -e .`, else install a wheel that has it"
    )
