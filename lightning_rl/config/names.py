"""Public names: which package exposes each; none is imported before its use."""

import ast
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rl.config import packages
from lightning_rl.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LIBRARY = Path(__file__).parents[1]
"""The folder of this package."""


def _shown_by(stub: Path) -> dict[str, str]:
    """Return the names that a stub imports, each with its module."""
    return {
        alias.name: statement.module
        for statement in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }


SURFACES = {
    "lightning_rl": _shown_by(LIBRARY / "__init__.pyi"),
    **{
        f"lightning_rl.{folder.name}": _shown_by(folder / "__init__.pyi")
        for folder in sorted(LIBRARY.iterdir())
        if (folder / "__init__.pyi").is_file()
    },
}
"""The names that each package with an ``__init__.pyi`` exposes, with their modules."""

MODULE_OF = {name: module for shown in SURFACES.values() for name, module in shown.items()}
"""Module of each public name. A configuration may use any public name without its module."""

HOME = {name: package for package, shown in reversed(SURFACES.items()) for name in shown}
"""Package to import each public name from; ``lightning_rl`` if that has it."""


def added() -> dict[str, "EntryPoint"]:
    """Return the classes added by installed packages, which configurations may name likewise."""
    return packages.added(packages.CLASSES, frozenset(MODULE_OF))


def public(name: str) -> Any:
    """Import the object of a public name, or of a name that an installed package adds.

    Raises:
        ConfigError: if another package cannot be imported, or its class has another name.
    """
    if name in MODULE_OF:
        return getattr(import_module(MODULE_OF[name]), name)
    result = packages.load(added()[name])
    if getattr(result, "__name__", None) != name:
        raise ConfigError(f"{added()[name].value} is registered as {name!r}, which is not its name")
    return result


def load_all() -> None:
    """Import all public names, so that a configuration may name subclasses by their short names."""
    for name in MODULE_OF:
        public(name)
    for name in added():
        with suppress(ConfigError):  # which only a configuration that names it is told
            public(name)


def surface(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, ``__dir__`` and ``__all__``, which import names on
    demand.
    """
    shown = sorted(SURFACES[package])

    def load(name: str) -> Any:
        if name in SURFACES[package]:
            return public(name)
        if f"{package}.{name}" in SURFACES:
            return import_module(f"{package}.{name}")
        home = HOME | packages.OPTIONAL_CLASSES
        hint = f"; it is in {home[name]}" if name in home else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return load, lambda: shown, shown
