"""The library's names: the public ones, none loaded before its use, and modules that have moved."""

import ast
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from lightning_rl.errors import ConfigError

_STUB = Path(__file__).parents[1] / "__init__.pyi"

MODULE_OF = {
    alias.name: statement.module
    for statement in ast.parse(_STUB.read_text()).body
    if isinstance(statement, ast.ImportFrom) and statement.module
    for alias in statement.names
}
"""Public name: the module that it is in."""

RENAMED = {
    "Coefficient": "ConstantSchedule",
    "ExponentialShare": "ExponentialSchedule",
    "LinearEpsilon": "LinearSchedule",
    "LinearShare": "LinearSchedule",
    "ReplayRecorder": "RerunRecorder",
}
"""Public name of earlier releases: what it is called now."""


def refuse_renamed(name: str) -> None:
    """Refuse a public name of an earlier release, short or with the modules it was in.

    Raises:
        ConfigError: naming the new one.
    """
    path, _, short = name.rpartition(".")
    if short in RENAMED and path.split(".")[0] in ("", "lightning_rl"):
        raise ConfigError(f"{short} is now called {RENAMED[short]}; write that instead")


def with_new_names(text: str) -> str:
    """The text of a configuration that an earlier release wrote, with the names of this one."""
    for old, new in RENAMED.items():
        text = re.sub(rf"(?<![\w.])(lightning_rl\.(\w+\.)*)?{old}\b", new, text)
    return text


def public(name: str) -> Any:
    """Import ``lightning_rl.<name>``."""
    return getattr(import_module(MODULE_OF[name]), name)


def load_all() -> None:
    """Import all of them; a configuration may then name subclasses by their short names."""
    for name in MODULE_OF:
        public(name)


def _read_moved() -> dict[str, str]:
    """Read the table of moves: a line for each module, with those that it took the place of."""
    lines = Path(__file__).with_name("moved.txt").read_text(encoding="utf-8").splitlines()
    moves = (line.split(" <- ") for line in lines)
    return {
        f"lightning_rl.{old}": f"lightning_rl.{new}" for new, olds in moves for old in olds.split()
    }


MOVED = _read_moved()
"""Where modules were, and where they are now."""

STILL_IMPORTED = ("lightning_rl.data.reasoning_gym", "lightning_rl.engines.vllm_worker")
"""Of these, the old name is the new module: it stands in configurations, or in commands that start
servers elsewhere."""

GONE_PACKAGES = {old for old in MOVED if any(other.startswith(f"{old}.") for other in MOVED)}


class MovedError(ModuleNotFoundError, ConfigError):
    """A module has another name now; for a script's import, and for a configuration's."""

    def __init__(self, old: str) -> None:
        super().__init__(f"{old} is {MOVED[old]} now; import that", name=old)


class _MovedModules(MetaPathFinder, Loader):
    """Refuses an old module name with the new one; last in line, so a file of ours goes first.

    Raises:
        MovedError: naming where the module is now, unless its old name still works.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        return spec_from_loader(fullname, self, is_package=fullname in GONE_PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in STILL_IMPORTED:
            sys.modules[old] = import_module(MOVED[old])
        elif old in GONE_PACKAGES:  # which is imported on the way to a module that was in it
            module.__getattr__ = partial(_refuse_attribute, old)  # type: ignore[method-assign]
        else:
            raise MovedError(old)


def _refuse_attribute(package: str, name: str) -> NoReturn:
    if name.startswith("__"):  # what the import itself asks for
        raise AttributeError(name)
    inside = f"{package}.{name}"
    raise MovedError(inside if inside in MOVED else package)


sys.meta_path.append(_MovedModules())
