"""TrainerBackend: how the learner of a PolicyModule computes within Lightning's Trainer."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_rl.learn.backends import Backend
from lightning_rl.learn.base import LearningModule
from lightning_rl.learn.schedulers import step_scheduler


class TrainerBackend(Backend):
    """Manual optimization with the optimizer, strategy and precision of a module's Trainer.

    Args:
        module: the module; it needs a Trainer once the learner computes gradients.
    """

    def __init__(self, module: LearningModule) -> None:
        self._module = module

    @property
    def optimizer(self) -> Any:
        return self._module.optimizers()  # one, so not a list

    @property
    def lr_scheduler(self) -> Any:
        """The Trainer's schedule of this optimizer."""
        return self._module.lr_schedulers()

    @property
    def device(self) -> torch.device:
        return self._module.device

    def autocast(self) -> AbstractContextManager[object]:
        plugin = self._module.trainer.precision_plugin
        context: AbstractContextManager[object] = plugin.train_step_context()
        return context

    def backward(self, loss: Tensor, last: bool) -> None:
        strategy: Any = self._module.trainer.strategy
        blocks = isinstance(strategy, DDPStrategy) and not last
        with strategy.block_backward_sync() if blocks else nullcontext():
            self._module.manual_backward(loss)

    def step(self) -> bool:
        skipped_before = self._module.nonfinite_steps
        self.optimizer.step()  # the Trainer calls on_before_optimizer_step, which may skip it
        if self._module.lr_scheduler is not None:
            step_scheduler(self.lr_scheduler)
        return self._module.nonfinite_steps == skipped_before
