"""Provide labelled data for tests: which way a pole falls."""

import torch
from tensordict import TensorDict


def falling(count: int = 256, seed: int = 0) -> TensorDict:
    """Label by the angle, number 2 of four: to one side, upright or to the other; a third each."""
    seen = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    label = (seen[:, 2] > -0.43).long() + (seen[:, 2] > 0.43).long()
    return TensorDict({"observation": seen, "label": label}, [count])
