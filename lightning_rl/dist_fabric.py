"""Several processes in a loop of your own, with Lightning Fabric."""

from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class FabricDDP(DDPStrategy):
    """DDP for ``Fabric(strategy=FabricDDP())`` around a ``PolicyModule``: each backward averages.

    Fabric's own averages gradients only if the forward pass goes through its wrapper, and the named
    steps do not: without a word, each rank would go its own way. Lightning's Trainer does the same
    for manual optimization.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        self._wrapper = super().setup_module(module)
        return self._wrapper

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        prepare_for_backward(self._wrapper, tensor)
        super().backward(tensor, module, *args, **kwargs)
