"""Processes that know nothing of the script that starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main() -> Iterator[None]:
    """While it lasts, processes that ``multiprocessing`` spawns do not import the script.

    They would run all of it again where it lacks ``if __name__ == "__main__"``. What is pickled
    meanwhile, and lives in the script, is refused by pickle, as no other process could find it.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
