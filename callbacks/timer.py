"""StepTimer: where an iteration's time goes."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback


class StepTimer(RLCallback):
    """Records ``time/generate``, ``reward``, ``logprob``, ``train``, ``sync``, ``eval``, ``other``.

    In seconds of wall time; they sum to ``time/iteration``. A stage of your own,
    ``with pl_module.clock("mine"): ...`` in a callback, becomes ``time/mine``.
    The first iteration's clock starts when training starts, so it holds the first sync and
    evaluation.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module_of(pl_module).clock.take()
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = self.module_of(pl_module)
        parts = module.clock.take()
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        row = {f"time/{stage}": seconds for stage, seconds in parts.items()}
        row["time/other"] = wall - sum(parts.values())
        module.record(row | {"time/iteration": wall})
