"""StagedReport: the metrics and results of a staged run, in files like those of other runs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rl.callbacks.report import installed_versions, plot_curves
from lightning_rl.errors import ConfigError
from lightning_rl.games.protocols.metrics import protocol_metrics
from lightning_rl.games.staged.sampler import cut_answers
from lightning_rl.games.staged.state import StagedState
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.metrics import read_rows, summarize
from lightning_rl.run.files.rundir import write_whole
from lightning_rl.run.files.strict_json import dumps

Row = dict[str, Any]


def verdict_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return accuracy, mean rewards (the verifier's and each agent's), :func:`protocol_metrics`."""
    logged = [rollout.logged for rollout in rollouts]
    names = dict.fromkeys(name for values in logged for name in values)
    means = {
        name: summarize([values[name] for values in logged if name in values])[0] for name in names
    }
    paid = summarize([rollout.reward for rollout in rollouts if rollout.reward is not None])[0]
    accuracy = means.pop("right")
    judged = protocol_metrics(rollouts, cut_answers)
    return {"accuracy": accuracy, "reward_mean": paid} | means | judged


class StagedReport:
    """Writes ``metrics.jsonl``, ``summary.json``, ``curves.png`` and ``models`` of a run.

    ``metrics.jsonl`` has a row per iteration; row i is about the models after i iterations.
    ``models`` has a link for each group whose last model is a directory.

    Args:
        run_dir: the run's directory, where they are.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def rows(self) -> list[Row]:
        """Return the rows so far."""
        path = self.run_dir / "metrics.jsonl"
        return read_rows(path.read_text("utf-8", "replace")) if path.exists() else []

    def note(self, iteration: int, metrics: dict[str, float]) -> None:
        """Add metrics to an iteration's row; a metric that is already there is replaced."""
        rows = {row["iteration"]: row for row in self.rows()}
        rows[iteration] = rows.get(iteration, {"iteration": iteration}) | metrics
        ordered = [rows[number] for number in sorted(rows)]
        lines = "".join(dumps(row) + "\n" for row in ordered)
        write_whole(self.run_dir / "metrics.jsonl", lines)

    def write_summary(self, state: StagedState) -> None:
        """Write ``summary.json``, the curves and the links to the last models."""
        rows = self.rows()
        tested = [row for row in rows if "eval/accuracy" in row]
        models = {name: group.models[-1] for name, group in state.groups.items()}
        summary = {
            "status": "completed",
            "iterations": state.iteration,
            "accuracy_before": tested[0]["eval/accuracy"] if tested else None,
            "accuracy_after": tested[-1]["eval/accuracy"] if tested else None,
            "models": models,
            "jobs": sum(len(group.jobs) for group in state.groups.values()),
            "versions": installed_versions(),
            "metrics": rows[-1] if rows else {},
        }
        write_whole(self.run_dir / "summary.json", dumps(summary, indent=2) + "\n")
        title = f"{self.run_dir.name}: {state.iteration} iterations"
        plot_curves(rows, str(self.run_dir / "curves.png"), title)

        for name, model in models.items():
            if Path(model).is_dir():
                _link(self.run_dir / "models" / name, Path(model))


def retest_directory(run_dir: Path, given: str | Path | None) -> Path:
    """Return the directory for a test of a run's models: the given one, or one beside the run's.

    Raises:
        ConfigError: if it lies in the run's own directory.
    """
    own = run_dir.resolve()
    where = own.with_name(f"{own.name}_retest") if given is None else Path(given)
    if own in (where.resolve(), *where.resolve().parents):
        raise ConfigError(
            f"retest_dir={str(given)!r} lies in the tested run's directory; use another"
        )
    return where


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target.resolve(), path.parent.resolve()))
