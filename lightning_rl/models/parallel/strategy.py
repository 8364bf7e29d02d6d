"""ShardedStrategy: Lightning's strategy of weights that are sharded over all processes (FSDP2)."""

from datetime import timedelta

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least


def refuse_mesh(module: LightningModule) -> None:
    """Refuse model-parallel strategies, for modules that do not shard their model.

    Raises:
        ConfigError: under a ``ModelParallelStrategy``, which leaves sharding to the module.
    """
    if module.device_mesh is not None:
        raise ConfigError(
            f"{type(module).__name__} does not shard its model, so under "
            f"{type(module.trainer.strategy).__name__} each process would train a copy of its own; "
            "use strategy: ddp, or one device"
        )


def warn_if_experimental(device: torch.device, **sizes: int) -> None:
    """Warn of GPUs that compute micro-batches together, which was only tried on CPUs."""
    shared = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if shared and device.type == "cuda":
        rank_zero_warn(
            f"{', '.join(shared)}: this is experimental; it is exact on CPUs, but was not tried on "
            "several GPUs yet. Compare the first iterations with a run that leaves it out"
        )


@configurable
class ShardedStrategy(ModelParallelStrategy):
    """Weights, gradients and optimizer state are sharded over all processes (FSDP2).

    What ``ModelParallelStrategy`` does, which can be used as well, except for ``cpu_offload``,
    ``sequence`` and ``expert``. With ``precision: bf16-mixed`` weights are gathered in
    bfloat16, gradients summed and weights trained in float32.

    Args:
        cpu_offload: keep shards of weights, gradients and the optimizer's state in host memory, and
            step there; a GPU then holds what is gathered and activations. Slow.
        sequence: processes that compute each micro-batch together, each its share of the tokens,
            for rollouts whose activations do not fit on one device; a divisor of the number of
            processes.
        tensor: processes that have each layer's matrices together, and compute each micro-batch
            together, for models whose layers do not fit on one device; a divisor of the number of
            processes, of the model's attention and key-value heads, of its MLPs' width and its
            vocabulary.
        expert: processes that have a mixture's experts together, to whom tokens travel, so that
            fewer are gathered; a divisor of the number of processes, and of that of experts.
        save_distributed_checkpoint: each process writes its share into a folder; False: rank 0
            writes one file.
        timeout: of collectives.

    Raises:
        ConfigError: for a ``sequence``, ``tensor`` or ``expert`` below 1, or one that does not
            divide the number of processes; for ``tensor`` together with ``expert``.
    """

    def __init__(
        self,
        cpu_offload: bool = False,
        sequence: int = 1,
        tensor: int = 1,
        expert: int = 1,
        save_distributed_checkpoint: bool = False,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timeout,
        )
        require_at_least(1, sequence=sequence, tensor=tensor, expert=expert)
        if tensor > 1 and expert > 1:
            raise ConfigError(
                f"tensor={tensor}, expert={expert}: matrices of a mixture of experts are not split "
                "yet; set one of them to 1"
            )
        self.cpu_offload = cpu_offload
        self.sequence = sequence
        self.tensor = tensor
        self.expert = expert
        self.expert_mesh: DeviceMesh | None = None
        """All processes, by ``expert_shards`` and ``expert``; None: without expert parallelism."""

    def setup_environment(self) -> None:
        world = self.num_nodes * self.num_processes
        for name, size in {"tensor": self.tensor, "expert": self.expert}.items():
            if world % size:
                raise ConfigError(
                    f"{name}={size} does not divide the run's {world} processes; change it, or "
                    "trainer.devices and num_nodes"
                )
        self._data_parallel_size = world // self.tensor
        warn_if_experimental(
            self.root_device, sequence=self.sequence, tensor=self.tensor, expert=self.expert
        )
        if self.cpu_offload and self.root_device.type == "cuda":
            # Norms and gathered weights of offloaded parameters travel by gloo.
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        super().setup_environment()
        if self.expert > 1:
            self.expert_mesh = init_device_mesh(
                self.root_device.type,
                (world // self.expert, self.expert),
                mesh_dim_names=("expert_shards", "expert"),
            )

    def model_to_device(self) -> None:
        """Move the model to its device, except shards that stay on the host."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for name, buffer in list(self.model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, buffer.to(self.root_device))
