"""Python's collector of garbage, where it finds none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import libraries without looking for garbage in between, nor later, until an engine closes.

    Modules make objects that stay. The collector goes through all of them again and again as their
    number grows: a seventh of the time that torch, Lightning, transformers and vLLM take to be
    imported. Where collection is off already, it stays so.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
