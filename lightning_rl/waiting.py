"""What is waited for, in a line on the terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_rl.dist import rank


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what happens in the block, and in the end how long it took; on rank 0, if it is said.

    On stderr, as Lightning's own messages. Two lines, since others may print between them.
    """
    if not what or rank() > 0:
        yield
        return
    begin = time.perf_counter()
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: done in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
