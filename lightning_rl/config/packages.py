"""Commands and classes that installed packages add, found by their entry points."""

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_rl.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "lightning_rl.commands"
"""Entry point group of commands; each names a :class:`~lightning_rl.extend.Command`."""
CLASSES = "lightning_rl.classes"
"""Entry point group of classes, under their own names, which configurations may use alone."""

OPTIONAL_COMMANDS = {"convert": "lightning_rl.convert"}
OPTIONAL_CLASSES = {
    "OpenEnvAgent": "lightning_rl.openenv",
    "OpenEnvPrompts": "lightning_rl.openenv",
    "OpenEnvServer": "lightning_rl.openenv",
    "VerifiersAgent": "lightning_rl.verifiers",
    "VerifiersPrompts": "lightning_rl.verifiers",
}
"""Classes of our own optional packages, which an installation may lack."""


@cache
def added(group: str, ours: frozenset[str]) -> dict[str, "EntryPoint"]:
    """Return the entry points of a group by name.

    The working directory is not searched: an untrusted folder could hold metadata that names code.

    Raises:
        ConfigError: if a package adds a name that is already taken.
    """
    from importlib.metadata import distributions  # slow to import, and not needed by most

    path = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    adding = {p.name for p in distributions(path=path) if p.entry_points.select(group=group)}
    result: dict[str, EntryPoint] = {}
    for package in sorted(adding):
        # The first on the path is the one whose code is imported.
        first = next(iter(distributions(name=package, path=path)))
        for point in first.entry_points.select(group=group):
            if point.name in ours or point.name in result:
                other = "lightning_rl" if point.name in ours else _package(result[point.name])
                raise ConfigError(
                    f"the package {package} adds {point.name!r} ({group}), which {other} has "
                    "already; uninstall or rename one of them"
                )
            result[point.name] = point
    return result


def load(point: "EntryPoint") -> Any:
    """Import the object that an entry point names.

    Raises:
        ConfigError: names the package, and why it cannot be imported.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # another's module, which may do anything
        raise ConfigError(
            f"{point.name!r} of the package {_package(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}; reinstall or uninstall the package"
        ) from error


def _package(point: "EntryPoint") -> str:
    return point.dist.name if point.dist is not None else "unknown"


def lacking(package: str) -> str:
    """Say how to install an optional package of ours that is missing."""
    return (
        f"it is in {package}, an optional part that is not installed here: in a checkout that has "
        "it run `make setup` or `pip install -e .`, else install a wheel that includes it"
    )
