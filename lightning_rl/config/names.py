"""The library's public names: which there are, and where each is; none is loaded before its use."""

import ast
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rl.errors import ConfigError

_STUB = Path(__file__).parents[1] / "__init__.pyi"

MODULE_OF = {
    alias.name: statement.module
    for statement in ast.parse(_STUB.read_text()).body
    if isinstance(statement, ast.ImportFrom) and statement.module
    for alias in statement.names
}
"""Public name: the module that it is in."""

RENAMED = {"ReplayRecorder": "RerunRecorder"}
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
    """What ``lightning_rl.<name>`` is."""
    return getattr(import_module(MODULE_OF[name]), name)


def load_all() -> None:
    """Import all of them; a configuration may then name subclasses by their short names."""
    for name in MODULE_OF:
        public(name)


MOVED = {"lightning_rl.engines.vllm_worker": "lightning_rl.sync.vllm_worker"}
"""Where modules were, and where they are now."""

STILL_IMPORTED = ("lightning_rl.engines.vllm_worker",)
"""Of these, the old name stands in commands that start servers elsewhere, and is the new module."""


class _MovedModules(MetaPathFinder, Loader):
    """Says of an old module name what the new one is; last in line, so a file of ours goes first.

    Raises:
        ModuleNotFoundError: naming where the module is now, unless its old name still works.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old not in STILL_IMPORTED:
            raise ModuleNotFoundError(f"{old} is {MOVED[old]} now; import that", name=old)
        sys.modules[old] = import_module(MOVED[old])


sys.meta_path.append(_MovedModules())
