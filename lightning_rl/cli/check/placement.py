"""Where and how a Trainer computes, as far as memory is concerned."""

from dataclasses import dataclass, field

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy


@dataclass(frozen=True)
class Placement:
    """The way a Trainer computes, and the place where it keeps what it trains.

    Weights are shared by ``shards`` processes (FSDP2), 1: each has them whole; with ``cpu_offload``
    what each has of them is in host memory. ``sequence`` processes compute a pack together, and
    ``tensor`` have matrices together, of which each part has its own ``shards``. ``expert``
    processes, of those that share weights, have experts together. ``device`` is what computes, in
    Lightning's ``precision``; with ``masters`` weights of 16 bits are trained in copies of 32.
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
    """Where a trainer's processes train, if each computes on such a device."""
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
    """How many processes have a model's matrices together under a strategy."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    size = strategy._tensor_parallel_size
    return strategy.num_processes if size == "auto" else size
