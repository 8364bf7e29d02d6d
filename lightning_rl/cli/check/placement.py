"""The properties of a Trainer that determine the memory of training."""

from dataclasses import dataclass, field

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy


@dataclass(frozen=True)
class Placement:
    """How a Trainer computes, and where it keeps what it trains.

    Weights are sharded over ``shards`` processes (FSDP2), 1: each has all of them; with
    ``cpu_offload`` the shards are in host memory. ``sequence`` processes compute a micro-batch
    together, and ``tensor`` split the matrices, of which each part has its own ``shards``.
    ``expert`` of the processes that shard weights split the experts. ``device`` computes, in
    Lightning's ``precision``; with ``masters``, 16-bit weights are trained in float32 copies.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "32-true"
    masters: bool = True
    shards: int = 1
    cpu_offload: bool = False
    sequence: int = 1
    tensor: int = 1
    expert: int = 1


def placement_of(trainer: Trainer, device: torch.device) -> Placement:
    """Return the placement of a trainer whose processes each compute on such a device."""
    strategy, tensor = trainer.strategy, tensor_size(trainer.strategy)
    shards = trainer.world_size if isinstance(strategy, ModelParallelStrategy) else 1
    return Placement(
        device,
        str(trainer.precision),
        getattr(trainer.precision_plugin, "master_weights", True),
        shards // tensor,
        getattr(strategy, "cpu_offload", False),
        getattr(strategy, "sequence", 1),
        tensor,
        getattr(strategy, "expert", 1),
    )


def tensor_size(strategy: Strategy) -> int:
    """Return the number of processes over which a strategy splits matrices."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    size = strategy._tensor_parallel_size
    return strategy.num_processes if size == "auto" else size
