"""Lengths of the episodes in a batch, and which of them are too short to learn from."""

from collections.abc import Sequence

import torch
from torch import Tensor


def too_short(done: Tensor, carried: Sequence[int], least: int) -> Tensor:
    """Mark steps (E, T) of episodes that ended in fewer than ``least`` steps.

    An episode that continues after the batch has not ended, so it is not too short.

    Args:
        done: (E, T), True if the episode ends with this step.
        carried: steps (E,) that the first episode of each environment had before the batch.
        least: minimum number of steps.
    """
    steps = torch.arange(done.shape[1])
    first = -torch.tensor(carried).unsqueeze(1)
    later = torch.where(done[:, :-1], steps[1:], first)
    begins = torch.cat([first, later], 1).cummax(1).values
    ends = torch.where(done, steps, done.shape[1]).flip(1).cummin(1).values.flip(1)
    return (ends < done.shape[1]) & (ends - begins + 1 < least)
