"""RecordingModule: one row of metrics per iteration, whoever adds to it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_rl.hooks import call_hook
from lightning_rl.stages import StageClock


class RecordingModule(LightningModule):
    """A LightningModule that counts iterations, times stages and gathers metrics.

    ``iteration`` is the number of iterations trained, which is also the version of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = StageClock()
        self.iteration = 0
        self._recorded: dict[str, float] = {}

    def record(self, metrics: dict[str, float]) -> None:
        """Add metrics to this iteration's row; callbacks use this instead of ``self.log``.

        They reach ``trainer.callback_metrics`` at once (``ModelCheckpoint(monitor=...)`` works) and
        the loggers in one call when the iteration ends.
        """
        self._recorded |= metrics
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in metrics.items()}
        )

    def flush_metrics(self) -> None:
        """Write the row of recorded metrics to every logger, at step ``iteration``."""
        if self._recorded:
            metrics, self._recorded = self._recorded, {}
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=self.iteration)
            call_hook(self.trainer, "on_iteration_end", metrics)

    # Lightning runs these after the callbacks' own, so one row holds what all of them recorded.
    def on_train_start(self) -> None:
        self.flush_metrics()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.flush_metrics()
