"""Weights sharded over ranks (FSDP2), for models that are too large for one device to train."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.dist import take_from_rank_zero
from lightning_rl.errors import ConfigError


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard parameters over the mesh that ``ModelParallelStrategy`` made, in place.

    Each transformer layer is gathered when it computes, the rest while ``module`` does. All ranks
    start from rank 0's parameters. From then on a forward pass takes all ranks.

    Raises:
        ConfigError: if the mesh splits tensors too.
    """
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        raise ConfigError(
            f"tensor_parallel_size={tensor.size()} is not supported; in the strategy set "
            f"data_parallel_size: {mesh.size()} and tensor_parallel_size: 1"
        )
    with torch.no_grad():
        for parameter in module.parameters():
            take_from_rank_zero(parameter)
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
    module.register_forward_hook(_end_scoring)


def _end_scoring(module: nn.Module, inputs: object, output: object) -> None:
    """Between passes ``parameters()`` are the shards, which are trained, synced and saved.

    FSDP leaves the outermost ones gathered for a backward pass, also where none follows.
    """
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in full, gathered by all ranks together; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
