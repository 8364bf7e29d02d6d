"""The library's public names, none loaded before its use."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

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
"""Class in configurations that were recorded earlier: its name today."""


def public(name: str) -> Any:
    """Import ``lightning_rl.<name>``."""
    return getattr(import_module(MODULE_OF[name]), name)


def load_all() -> None:
    """Import all of them; a configuration may then name subclasses by their short names."""
    for name in MODULE_OF:
        public(name)
