"""Tests several checkpoints on the same held-out tasks and seeds, with one engine for all."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.estimates import Comparison
from lightning_rl.errors import CheckpointError, ConfigError, kind_of_path
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.files.checkpoint_io import about, checkpoints_in, require_good
from lightning_rl.run.files.rundir import run_dir, write_whole
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.hooks import find_callbacks

Row = dict[str, Any]
"""A row of the table: ``checkpoint``, ``iteration``, metrics, and ``against`` the first row."""

Named = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A folder of checkpoints, a checkpoint, or a list of these."""


def checkpoints_named(given: Named) -> list[Path]:
    """Return checkpoints in the order of a list, or a folder's checkpoints by iteration.

    Raises:
        ConfigError: if there are none, or one is missing, damaged or not a checkpoint.
    """
    if isinstance(given, str | PathLike):
        result = _in_folder(Path(given))
    else:
        result = [Path(path) for path in given]
    if not result:
        raise ConfigError("checkpoints: the list is empty; add checkpoints, or leave it out")
    for path in result:
        require_checkpoint(path, "checkpoints")
        if not about(path):
            raise ConfigError(
                f"checkpoints: {str(path)!r} records no iteration, so it was not saved while "
                "learning from rewards; leave it out, or test it alone with ckpt_path"
            )
    return result


def _in_folder(place: Path) -> list[Path]:
    if not place.is_dir() or (place / "meta.pt").exists():  # a sharded checkpoint is a folder too
        return [place]
    result = checkpoints_in(place)[::-1]
    if not result:
        inside = place / "checkpoints"
        fix = (
            f"did you mean {inside}?"
            if inside.is_dir()
            else "pass a folder of checkpoints, or a list"
        )
        raise ConfigError(f"checkpoints: {str(place)!r} holds no *.ckpt; {fix}")
    return result


def require_checkpoint(path: str | Path, key: str) -> None:
    """Check that a checkpoint exists and is intact.

    Raises:
        ConfigError: naming the configuration's key, the path and the fault.
    """
    if not os.path.exists(path):  # False too for a name that no file can have
        raise ConfigError(f"{key}: {str(path)!r} does not exist (working directory: {Path.cwd()})")
    kind = kind_of_path(Path(path))
    if kind not in (None, "a folder"):  # that of a sharded checkpoint
        raise ConfigError(f"{key}: {str(path)!r} is {kind}, not a file; pass the path of a file")
    try:
        require_good(Path(path))
    except CheckpointError as error:
        raise ConfigError(f"{key}: {str(path)!r} cannot be used: {error}") from error


class CheckpointSeries:
    """Loads one checkpoint after the other into a module, and evaluates each.

    Metrics go to the loggers at the checkpoint's iteration, and to ``test.json`` in the run
    directory. Each is also compared with the first, held-out prompt by held-out prompt, since all
    get the same prompts and seeds. Weights are pushed to the engine as ``WeightSync`` does; the
    engine is not restarted.

    Args:
        trainer: its ``test`` calls this for each checkpoint.
        model: the module that the weights are loaded into.
        datamodule: evaluates.
        paths: the checkpoints.
        weights_only: as in ``Trainer.test``.

    Raises:
        ConfigError: if ``model`` or ``datamodule`` does not support this.
    """

    NAME = "test.json"

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        paths: Sequence[Path],
        weights_only: bool | None = None,
    ) -> None:
        if not isinstance(model, RecordingModule):
            raise ConfigError(
                f"checkpoints: {type(model).__name__} counts no iterations by which to identify "
                "them; test each alone with ckpt_path"
            )
        if not isinstance(datamodule, CollectingDataModule):
            raise ConfigError(
                f"checkpoints: {type(datamodule).__name__} evaluates nothing by itself; use an "
                "RLDataModule, or test each alone with ckpt_path"
            )
        if not datamodule.evaluates:
            fix = datamodule.nothing_to_evaluate
            raise ConfigError(f"checkpoints: there is nothing to evaluate on; {fix}")
        self.trainer, self.model, self.datamodule = trainer, model, datamodule
        self.paths = list(paths)
        self.weights_only = weights_only
        self.rows: list[Row] = []
        self.comparisons: list[str] = []
        """Lines of text: each checkpoint against the first."""
        self._first: dict[str, dict[str, float]] = {}

    def test(self, place: int) -> dict[str, float]:
        """Evaluate a checkpoint; returns nothing for Lightning to log or average."""
        path = self.paths[place]
        self._load(path)
        for sync in find_callbacks(self.trainer, WeightSync):
            sync.sync(self.trainer, self.model)
        done, metrics = self.datamodule.evaluate()
        self._keep(path, metrics, self.datamodule.scores(done))
        return {}

    def _load(self, path: Path) -> None:
        """Load a checkpoint as ``ckpt_path`` would, but only into the module."""
        connector = self.trainer._checkpoint_connector
        connector.resume_start(str(path), weights_only=self.weights_only)
        connector.restore_model()
        connector.resume_end()

    def _keep(
        self, path: Path, metrics: dict[str, float], scores: dict[str, dict[str, float]]
    ) -> None:
        iteration = self.model.iteration
        self.rows.append({"checkpoint": str(path), "iteration": iteration} | metrics)
        if len(self.rows) == 1:
            self._first = scores
        else:
            self._compare(scores)
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=iteration)
        if self.trainer.is_global_zero:
            text = dumps(self.rows, indent=2) + "\n"
            write_whole(run_dir(self.trainer) / self.NAME, text)

    def _compare(self, scores: dict[str, dict[str, float]]) -> None:
        """Compare the last row with the first, score by score."""
        first, last = self.rows[0]["checkpoint"], self.rows[-1]
        found: dict[str, Comparison] = {}
        for name, own in scores.items():
            if len(self._first[name].keys() & own) > 1:
                comparison = Comparison.of(self._first[name], own)
                if comparison not in found.values():  # a reward of 0 or 1 is the accuracy
                    found[name] = comparison
        if found:
            last["against"] = {name: asdict(comparison) for name, comparison in found.items()}
        self.comparisons += [
            f"{last['checkpoint']} against {first}: {name} {told}" for name, told in found.items()
        ]


def as_table(rows: Sequence[Row]) -> str:
    """Format rows as a table with a line per checkpoint and a column per metric.

    An interval stands behind its metric.
    """
    columns = dict.fromkeys(name for row in rows for name in row if name != "against")
    names = [
        name for name in columns if _metric_of(name) == name or _metric_of(name) not in columns
    ]
    cells = [names, *([_cell(row, name) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in cells
    )


def _metric_of(bound: str) -> str:
    """Return the metric of a bound of its interval; any other name unchanged."""
    return bound.removesuffix("_low").removesuffix("_high")


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    if (low := row.get(f"{name}_low")) is None:
        return text
    return f"{text} [{low:.3g}, {row[f'{name}_high']:.3g}]"
