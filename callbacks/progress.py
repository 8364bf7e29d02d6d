"""RLProgressBar and StepTimer: a run's progress, its present stage, and the time of each stage."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.report import headline
from lightning_rl.config.arguments import configurable
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.hooks import last_iteration

LABELS = {
    "reward/mean": "reward",
    "eval/accuracy": "accuracy",
    "eval/reward_mean": "held-out reward",
    "rollout/tokens_per_s": "tok/s",
    "rollout/frames_per_s": "frames/s",
}
HELD_OUT = ("eval/accuracy", "eval/reward_mean")


@configurable
class RLProgressBar(TQDMProgressBar, RLCallback):
    """Lightning's progress bar in RL's terms; one step of it is one iteration.

    If the output is not a terminal (a log file, CI) there is no bar, but a line per iteration.
    ``fit`` replaces Lightning's bar by it, if that is the Trainer's default.

    Args:
        refresh_rate: iterations between two redraws, or lines; 0 switches the bar off. In
            supervised training, which has no iterations, it counts batches, and lines are printed
            at most every ``log_every_n_steps``.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._metrics: dict[str, Any] = {}
        self._held_out: dict[str, float] = {}
        self._steps = math.inf
        self._since = 0.0

    @property
    def is_disabled(self) -> bool:
        return super().is_disabled or not draws()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if isinstance(pl_module, RecordingModule):
            pl_module.clock.listeners.append(self._show_stage)
        else:
            self._steps = trainer.estimated_stepping_batches

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        iteration = self.module_of(pl_module).iteration
        last = last_iteration(trainer, iteration)
        held_out = {name: value for name, value in metrics.items() if name in HELD_OUT}
        self._held_out = held_out or self._held_out  # they stand until the next evaluation
        if _figures(metrics) and (iteration % max(self.refresh_rate, 1) == 0 or iteration == last):
            of = f"/{last}" if last < math.inf else ""
            self._write_line(f"iteration {iteration}{of}", _figures(self._held_out | metrics))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if isinstance(pl_module, RecordingModule):
            return
        batch, last = batch_idx + 1, trainer.num_training_batches
        if batch % max(self.refresh_rate, trainer.log_every_n_steps, 1) == 0 or batch == last:  # type: ignore[attr-defined]
            of = f" of {self._steps}" if self._steps < math.inf else ""
            figures = self.get_metrics(trainer, pl_module)
            said = {name: _in_four_digits(value) for name, value in figures.items()}
            self._write_line(f"epoch {trainer.current_epoch}, step {trainer.global_step}{of}", said)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the few figures that show the run's progress."""
        logged = super().get_metrics(trainer, pl_module)
        logged.pop("v_num", None)  # the logger's count of directories
        self._metrics = logged | _figures(trainer.callback_metrics)
        return self._metrics

    def _write_line(self, where: str, figures: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        if self.is_enabled and not draws():
            said = "".join(f"{name} {value}, " for name, value in figures.items())
            print(f"{where}: {said}{seconds:.2g} s", flush=True)

    def _show_stage(self, stage: str) -> None:
        if self.is_enabled and self._train_progress_bar is not None:
            self.train_progress_bar.set_postfix(self._metrics | {"stage": stage})


def draws() -> bool:
    """Return True if the output can be redrawn: a terminal, or a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _figures(metrics: Mapping[str, Any]) -> dict[str, str]:
    speeds = ("rollout/tokens_per_s", "rollout/frames_per_s")
    names = dict.fromkeys(["reward/mean", *headline([metrics]), *speeds])
    known = {name: float(metrics[name]) for name in names if name in metrics}
    return {LABELS[n]: f"{v:.3g}" if abs(v) < 1000 else f"{v:,.0f}" for n, v in known.items()}


def _in_four_digits(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StepTimer(RLCallback):
    """Records ``time/generate``, ``reward``, ``logprob``, ``train``, ``sync``, ``eval``, ``other``.

    They are seconds of wall time and sum to ``time/iteration``. A stage of your own, ``with
    pl_module.clock("mine"): ...`` in a callback, becomes ``time/mine``. The clock of the first
    iteration starts with training, so it includes the first sync and evaluation.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module_of(pl_module).clock.take()
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = self.module_of(pl_module)
        if not module.iteration_ended:
            return
        parts = module.clock.take()
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        row = {f"time/{stage}": seconds for stage, seconds in parts.items()}
        row["time/other"] = wall - sum(parts.values())
        module.record(row | {"time/iteration": wall})
