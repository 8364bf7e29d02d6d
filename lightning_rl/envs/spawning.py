"""Processes that do not import the script that starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes that ``multiprocessing`` spawns meanwhile from importing the script.

    A script without ``if __name__ == "__main__"`` would run again in each of them. Pickle refuses
    objects defined in the script meanwhile, since no other process could find them.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
