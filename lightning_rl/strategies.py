"""Lightning's FSDP2 strategy, over all processes."""

from datetime import timedelta

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_rl.arguments import configurable


@configurable
class ShardedStrategy(ModelParallelStrategy):
    """Weights, gradients and the optimizer's state are shared out among all processes (FSDP2).

    What ``ModelParallelStrategy`` does with as many data-parallel processes as there are; it can be
    used as well, but for ``cpu_offload``. With ``precision: bf16-mixed`` weights are gathered in
    bfloat16, gradients summed and weights trained in float32.

    Args:
        cpu_offload: keep shards of weights, gradients and the optimizer's state in host memory, and
            step there; a GPU then holds what is gathered and activations. Slow.
        save_distributed_checkpoint: each process writes its share into a folder; False: rank 0
            writes one file.
        timeout: of collectives.
    """

    def __init__(
        self,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = False,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timeout,
        )
        self.cpu_offload = cpu_offload

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.cpu_offload and self.root_device.type == "cuda":
            # Norms and gathered weights of what is kept on the host travel by gloo.
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        super().setup_environment()

    def model_to_device(self) -> None:
        """All but the shards that stay on the host."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for name, buffer in list(self.model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, buffer.to(self.root_device))
