"""Disturb rounding in every Python process whose PYTHONPATH has this folder.

Python imports this module at its start. It does nothing before torch is imported, and nothing
without the variable; other programs that a test starts neither wait for torch nor need it.
"""

import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder

CHOSEN = os.environ.get("LIGHTNING_RL_ROUNDING")
FUNCTIONS = {"torch": "disturb", "vllm._custom_ops": "disturb_vllm"}
"""The function of kernels.py that is called once a module has been imported."""
KEPT = []
"""The replaced kernels, which last as long as these objects."""


class Finder(MetaPathFinder):
    """Finds modules as others do, and calls a function after they were executed."""

    def find_spec(self, name, path, target=None):
        if name not in FUNCTIONS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader = Then(spec.loader, FUNCTIONS[name])
        return spec


class Then(Loader):
    def __init__(self, loader, function):
        self.loader, self.function = loader, function

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        kernels = importlib.import_module(f"{package()}.kernels")
        seed, size, draws = f"{CHOSEN}::".split(":")[:3]
        KEPT.append(getattr(kernels, self.function)(int(seed), float(size or 1), draws))


def package() -> str:
    """Import the package of this folder's parent, which need not be in the path."""
    name = "lightning_rl_disturbed"
    if name not in sys.modules:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return name


if CHOSEN:
    sys.meta_path.insert(0, Finder())
