"""Python's garbage collector, switched off where there is no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import libraries without garbage collection, also afterwards until an engine closes.

    Modules create objects that stay. The collector traverses all of them again and again as their
    number grows: a seventh of the time it takes to import torch, Lightning, transformers and vLLM.
    If collection is already off, it stays off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
