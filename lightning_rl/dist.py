"""Sums over all ranks that are exact no-ops on one process."""

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(value: Tensor) -> Tensor:
    """The sum of ``value`` over all ranks, without gradient."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def global_mean_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) standard deviation of a vector spread over all ranks."""
    values = values.double()
    count, total = all_sum(torch.stack([torch.ones_like(values).sum(), values.sum()]))
    mean = total / count
    variance = all_sum(((values - mean) ** 2).sum()) / count
    return mean.float(), variance.sqrt().float()


def all_max(value: Tensor) -> Tensor:
    """The element-wise maximum of ``value`` over all ranks."""
    if world_size() == 1:
        return value
    peak = value.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak
