"""Backend: how a learner computes, with forms for Lightning's Trainer, Fabric and plain torch."""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.learn.gradients import skip_step, step_norm
from lightning_rl.learn.schedulers import step_scheduler
from lightning_rl.run.processes.dist import any_rank


class Backend(ABC):
    """Runs a learner's backward passes and optimizer steps.

    There are three: :class:`TorchBackend`, ``FabricBackend`` (of an ``OwnLoop``) and
    ``TrainerBackend`` (of a ``PolicyModule``).
    """

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The optimizer of the policy's weights, or what wraps it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that computes."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[object]:
        """Return the precision context of an iteration."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a scalar loss's gradient; average gradients over ranks if it is the ``last`` one."""

    @abstractmethod
    def step(self) -> bool:
        """Step the optimizer and the learning-rate schedule.

        Returns:
            False if nothing was changed, since a gradient is NaN or infinite on some rank.
        """


class TorchBackend(Backend):
    """Plain torch on one process.

    Args:
        optimizer: the optimizer of the policy's weights.
        lr_scheduler: stepped once per optimizer step; None: none.
    """

    def __init__(self, optimizer: Optimizer, lr_scheduler: Any = None) -> None:
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._warned = False

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    @property
    def device(self) -> torch.device:
        parameter: Tensor = self._optimizer.param_groups[0]["params"][0]
        return parameter.device

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> bool:
        skipped = any_rank(not math.isfinite(step_norm(self._optimizer)))
        if skipped:
            skip_step(self._optimizer, "policy", warn=not self._warned)
            self._warned = True
        self._optimizer.step()
        if self._lr_scheduler is not None:
            step_scheduler(self._lr_scheduler)
        return not skipped
