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
        optimizer: index of the optimizer, if the Trainer has several.
        lr_scheduler: the same of the learning-rate schedule.
    """

    def __init__(self, module: LearningModule, optimizer: int = 0, lr_scheduler: int = 0) -> None:
        self.module = module
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler

    @property
    def optimizer(self) -> Any:
        return _one_of(self.module.optimizers(), self._optimizer)

    @property
    def device(self) -> torch.device:
        return self.module.device

    def autocast(self) -> AbstractContextManager[object]:
        plugin = self.module.trainer.precision_plugin
        context: AbstractContextManager[object] = plugin.train_step_context()
        return context

    def backward(self, loss: Tensor, last: bool) -> None:
        strategy: Any = self.module.trainer.strategy
        blocks = isinstance(strategy, DDPStrategy) and not last
        with strategy.block_backward_sync() if blocks else nullcontext():
            self.module.manual_backward(loss)

    def step(self) -> bool:
        skipped_before = self.module.nonfinite_steps
        self.optimizer.step()  # the Trainer calls on_before_optimizer_step, which may skip it
        if self.module.lr_scheduler is not None:
            step_scheduler(_one_of(self.module.lr_schedulers(), self._lr_scheduler))
        return self.module.nonfinite_steps == skipped_before


def _one_of(found: Any, place: int) -> Any:
    """Return one of what Lightning gives as a list, unless it is a single one."""
    return found[place] if isinstance(found, list) else found
