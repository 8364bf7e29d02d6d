"""One seed for a run: ``seed_everything``'s, unless a part is given its own."""

import os


def run_seed(seed: int | None) -> int:
    """``seed`` if given, else what Lightning's ``seed_everything`` was called with, else 0."""
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
