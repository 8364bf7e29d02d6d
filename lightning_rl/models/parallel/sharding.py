"""Weights sharded over ranks (FSDP2), for models that are too large for one device to train."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.errors import ConfigError
from lightning_rl.models.parallel.expert import spread
from lightning_rl.models.parallel.tensor import TensorRanks, local
from lightning_rl.run.processes.dist import every_rank, rank, take_from_rank_zero


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Dtypes to gather weights and sum gradients in, by Lightning's ``precision``.

    Weights used in bfloat16 are also gathered in it, though the trained ones are float32. Inputs
    are not cast: among them are masks, logprobs and rewards, which 16 bits would round, and layers
    get the outputs of earlier layers.
    """
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16-mixed" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


@contextmanager
def read_by_rank_zero() -> Iterator[None]:
    """Build models in this block with weights on rank 0 only, and shapes elsewhere.

    A failure on rank 0, the only one that reads files, fails on all ranks.
    """
    with every_rank(), torch.device("cpu" if rank() == 0 else "meta"):
        yield


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: str = "32-true",
    cpu_offload: bool = False,
    experts: DeviceMesh | None = None,
) -> None:
    """Shard parameters over the mesh that ``ModelParallelStrategy`` made, in place.

    Each transformer layer is gathered when it computes, the rest while ``module`` does. All ranks
    start from rank 0's parameters and buffers, one at a time, so that no other ever holds more than
    its shards and the largest. From then on a forward pass takes all ranks. Where the mesh splits
    tensors too, the module splits itself before, and each part is sharded. Experts are gathered by
    themselves, from those ranks that have the same ones.

    Args:
        module: with its weights on rank 0; on others maybe on the meta device.
        mesh: of data-parallel times tensor-parallel ranks.
        precision: of the Trainer.
        cpu_offload: keep shards, gradients and the optimizer's state in host memory.
        experts: the same ranks, by which of them have the same experts (``expert_shards``), and
            which have all of a layer together (``expert``); None: each has all.

    Raises:
        ConfigError: if the module cannot be split.
    """
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    offload = CPUOffloadPolicy(torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    policies: dict[str, Any] = {"mp_policy": mixed_precision(precision), "offload_policy": offload}
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in named}
    _keep_shapes(module)
    if tensor.size() > 1:
        cast(Any, module).split(TensorRanks(tensor))
    if experts is not None:
        same = experts["expert_shards"]
        for stack in spread(module, TensorRanks(experts["expert"])):
            fully_shard(stack, mesh=same, shard_placement_fn=partial(shared_dim, same), **policies)
    if tensor.size() > 1 or experts is not None:
        # Whoever gathers a tensor is told by torch that two steps, along one dimension of the mesh
        # and then the other, could be one. All ranks take them in the same order.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=data, **policies)
    fully_shard(module, mesh=data, **policies)
    _scatter(module, tensors, _device_of(mesh), cpu_offload)
    module.register_forward_hook(_reshard_after_scoring)


def shared_dim(same: DeviceMesh, parameter: nn.Parameter) -> Shard:
    """Return the dimension in which ranks shard the same experts: experts, or rows if too few.

    Raises:
        ConfigError: if the ranks do not divide the rows either.
    """
    part, size = local(parameter), same.size()
    if len(part) % size == 0:
        return Shard(0)
    if part.shape[1] % size:
        raise ConfigError(
            f"{size} processes have the same {len(part)} experts, and divide neither these nor "
            f"their {part.shape[1]} rows; set expert to another divisor of the experts' number"
        )
    return Shard(1)


def _keep_shapes(module: nn.Module) -> None:
    """Keep only shapes, since weights are overwritten after sharding; tied weights stay tied."""
    known: dict[Tensor, Any] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in known:
                shape = torch.empty_like(parameter, device="meta")
                known[parameter] = nn.Parameter(shape, parameter.requires_grad)
            owner.register_parameter(name, known[parameter])
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, known.setdefault(buffer, torch.empty_like(buffer, device="meta")))


@torch.no_grad()
def _scatter(
    module: nn.Module, tensors: dict[str, Tensor], device: torch.device, cpu_offload: bool
) -> None:
    """Scatter rank 0's tensors, and free each when it is done."""
    module.to_empty(device="cpu" if cpu_offload else device)

    def on_device(name: str) -> Tensor:
        tensor = tensors.pop(name)
        return tensor.to(device) if rank() == 0 else torch.empty_like(tensor, device=device)

    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        scattered = distribute_tensor(on_device(name), mesh, placements)
        parameter.to_local().copy_(scattered.to_local())
    for name, _ in list(module.named_buffers()):
        buffer = on_device(name)
        take_from_rank_zero(buffer)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer)


def _device_of(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def _reshard_after_scoring(module: nn.Module, inputs: object, output: object) -> None:
    """Reshard after scoring, so that ``parameters()`` are shards to train, sync and save.

    FSDP keeps the outermost module gathered for a backward pass, even if none follows.
    """
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in full, gathered by all ranks together; any other unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor's full shape without data, on the ``meta`` device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
