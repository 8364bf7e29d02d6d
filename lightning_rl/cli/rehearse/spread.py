"""A reward by which the rollouts of a random model differ, so that a rehearsal's updates learn."""

from collections.abc import Sequence
from zlib import crc32


def by_chance(
    prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: object
) -> list[float]:
    """Return 0 or 1 for each completion, the same for the same tokens."""
    return [float(crc32(repr(list(ids)).encode()) & 1) for ids in completion_ids]
