"""Python imports this at its start where PYTHONPATH has its folder: then rounding is disturbed.

Nothing happens before torch is imported, and nothing without the variable; other programs that a
test starts neither wait for torch nor need it.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder

CHOSEN = os.environ.get("LIGHTNING_RL_ROUNDING")
FUNCTIONS = {"torch": "disturb", "vllm._custom_ops": "disturb_vllm"}
"""What is called once a module has been imported."""
KEPT = []
"""What disturbs, for as long as the process lives."""


class Finder(MetaPathFinder):
    """Finds modules as others do, and has a function called after they were executed."""

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
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            "lightning_rl_disturbed_kernels", os.path.join(root, "kernels.py")
        )
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        KEPT.append(getattr(kernels, self.function)(*map(int, CHOSEN.split(":"))))


if CHOSEN:
    sys.meta_path.insert(0, Finder())
