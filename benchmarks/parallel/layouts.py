"""Define layouts of processes that compute micro-batches together, for
benchmarks/parallel/ranks.py."""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_rl.models.parallel.expert import spread
from lightning_rl.models.parallel.tensor import TensorRanks
from lightning_rl.models.policy import Policy

DEVICE = "PARALLEL_DEVICE"
"""An environment variable: the type of device that ranks compute on; by default ``cpu``."""


def begin() -> None:
    """Join the other ranks, each with a device of its own, unless that was done."""
    if dist.is_initialized():
        return
    if device().type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def device() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device(os.environ.get(DEVICE, "cpu"))


class Layout(NamedTuple):
    """Ranks that share a micro-batch's tokens, a model's matrices, and a mixture's experts."""

    sequence: int = 1
    tensor: int = 1
    expert: int = 1


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "sequence": lambda ranks: Layout(sequence=ranks),
    "tensor": lambda ranks: Layout(tensor=2),
    "both": lambda ranks: Layout(sequence=ranks // 2, tensor=2),
    "expert": lambda ranks: Layout(expert=ranks),
    "pairs": lambda ranks: Layout(expert=2),
    "mixed": lambda ranks: Layout(sequence=ranks, expert=2),
}
"""The layouts by name, for so many ranks."""


def share(policy: Policy, layout: str) -> None:
    """Let all ranks compute micro-batches together in a layout, each with the weights it needs."""
    shared = LAYOUTS[layout](dist.get_world_size())
    if shared.tensor > 1:
        policy.split(_neighbours(shared.tensor))
    if shared.expert > 1:
        spread(policy, _neighbours(shared.expert))
    if shared.sequence * shared.tensor > 1:
        policy.share_micro_batches(shared.sequence)


def _neighbours(count: int) -> TensorRanks:
    shape = dist.get_world_size() // count, count
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("others", "these"))
    return TensorRanks(mesh["these"])
