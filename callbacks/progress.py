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


@configurable
class RLProgressBar(TQDMProgressBar, RLCallback):
    """Lightning's progress bar in RL's terms; one step of it is one iteration.

    If the output is not a terminal (a log file, CI) there is no bar, but a line per iteration.
    ``fit`` replaces Lightning's bar by it, if that is the Trainer's default.

    Args:
        refresh_rate: iterations between two redraws, or lines; 0 switches the bar off. In
            supervised training the bar counts batches, and lines optimizer steps: at most one in
            50 of a long run, or one in ``log_every_n_steps`` if that is less.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._metrics: dict[str, Any] = {}
        self._least = 1
        self._since = 0.0

    @property
    def is_disabled(self) -> bool:
        return super().is_disabled or not draws()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        module = self.module_of(pl_module)
        module.clock.listeners.append(self._show_stage)
        if module.automatic_optimization:  # its iterations are steps, of which there are many
            steps = last_iteration(trainer, module.iteration)
            interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self._least = int(min(interval, max(1, steps // 50))) or 1

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        iteration = self.module_of(pl_module).iteration
        last = last_iteration(trainer, iteration)
        due = iteration % max(self.refresh_rate, self._least) == 0 or iteration == last
        if _figures(metrics) and (due or any("/val_" in name for name in metrics)):
            of = f"/{last}" if last < math.inf else ""
            self._write_line(f"iteration {iteration}{of}", _figures(metrics))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the few figures that show the run's progress."""
        logged = super().get_metrics(trainer, pl_module)
        logged.pop("v_num", None)  # the logger's count of directories
        known = trainer.callback_metrics
        if isinstance(pl_module, RecordingModule):  # an earlier evaluation is not this iteration's
            new = pl_module.recorded.keys()
            known = {n: v for n, v in known.items() if n in new or not n.startswith("eval/")}
        self._metrics = logged | _figures(known)
        return self._metrics

    def _write_line(self, where: str, figures: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        if self.is_enabled and not draws():
            figures_text = "".join(f"{name} {value}, " for name, value in figures.items())
            print(f"{where}: {figures_text}{seconds:.2g} s", flush=True)

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
    return {
        LABELS.get(n, n): f"{v:.3g}" if abs(v) < 1000 else f"{v:,.0f}" for n, v in known.items()
    }


class StepTimer(RLCallback):
    """Records ``time/generate``, ``reward``, ``logprob``, ``train``, ``sync``, ``eval``, ``other``.

    They are seconds of wall time and sum to ``time/iteration``. A stage of your own, ``with
    pl_module.clock("mine"): ...`` in a callback, becomes ``time/mine``. The clock of the first
    iteration starts with training, so it includes the first sync and evaluation.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module_of(pl_module).clock.take()
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = self.module_of(pl_module)
        if not module.iteration_ended:
            return
        parts = module.clock.take()
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        row = {f"time/{stage}": seconds for stage, seconds in parts.items()}
        row["time/other"] = wall - sum(parts.values())
        module.record(row | {"time/iteration": wall})
