"""A run directory as a rerun reads it: configuration, rerun log, checkpoints, rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import fsum
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lightning_rl.config.layers import Change, config_files, differences, flatten
from lightning_rl.data.rollouts.files import recorded_files
from lightning_rl.data.rollouts.log import FILE, Outcome, RerunLog
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.checkpoint_io import about, require_good
from lightning_rl.run.files.metrics import MetricsLog, read_rows
from lightning_rl.run.files.resume import kind_of, run_day_of


def config_in(file: Path) -> dict[str, Any]:
    """Return a run's recorded configuration.

    Raises:
        DataError: if the file is not a configuration.
    """
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError("it holds no keys")
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is not a run's configuration ({error}); restore it") from error
    return config


@dataclass(frozen=True)
class KeptWeights:
    """Weights in a checkpoint; if ``path`` is None, the run's initial weights."""

    version: int
    path: Path | None

    def __str__(self) -> str:
        return "the initial weights" if self.path is None else f"checkpoint {self.path.name}"

    def lead_to(self, version: int) -> str:
        """Describe how a version was made from these weights."""
        steps = version - self.version
        how = f" and {steps} iterations trained again" if steps else ""
        return f"{self} (version {self.version}){how}"

    def load(self) -> dict[str, Any]:
        """Load the checkpoint, without executing code in it.

        Raises:
            CheckpointError: if it is damaged.
        """
        assert self.path is not None
        require_good(self.path)
        checkpoint: dict[str, Any]
        checkpoint = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        return checkpoint


class RecordedRun:
    """The directory of a recorded run.

    Args:
        path: the directory.
        options: command-line options for building the run's parts, such as ``--trusted_only``.

    Raises:
        DataError: if the directory holds no ``config.yaml``, or a model instead.
    """

    def __init__(self, path: Path, options: Sequence[str] = ()) -> None:
        self.path = path
        self.options = options
        self.config = path / "config.yaml"
        self.log = RerunLog(path)
        if (path / "config.json").is_file():
            raise DataError(
                f"{path} is an exported model, which has weights but no optimizer state, "
                "rollouts or configuration; pass the directory of the run that wrote it"
            )
        if not self.config.is_file():
            raise DataError(
                f"{path} holds no config.yaml, which `lightning-rl fit` writes to the directory of "
                f"a run that has a logger (working directory: {Path.cwd()}); name that directory"
            )

    def config_of(self, version: int) -> tuple[int, Path]:
        """Return the configuration that a version was trained with, and since which version it
        holds.
        """
        files = config_files(self.path)
        since = max(first for first in files if first <= version)
        return since, files[since]

    def saved_otherwise(self, kept: KeptWeights) -> bool:
        """Return True if the run may have gone on from these weights with other settings."""
        here = kept.path is None or kept.path.is_relative_to(self.path)
        return not here or kept.version in config_files(self.path).keys() - {0}

    def changes(self, first: int, last: int) -> dict[int, list[Change]]:
        """Return what was configured to learn otherwise within iterations ``first`` to ``last``, by
        the version after which it was.
        """
        files = config_files(self.path)
        tables = {since: flatten(config_in(files[since])) for since in sorted(files)}
        found = {}
        for (_, then), (since, now) in pairwise(tables.items()):
            changes = [c for c in differences(then, now) if kind_of(c, then, now) == "alters"]
            if changes and first <= since < last:
                found[since] = changes
        return found

    @property
    def day(self) -> str | None:
        """The day on which the run began, which chat templates may show; None if not recorded."""
        return run_day_of(self.path / "checkpoints")

    @cached_property
    def kept(self) -> list[KeptWeights]:
        """All weights that were kept, oldest first, without damaged checkpoints."""
        files = sorted(f for f in self.path.rglob("*.ckpt") if f.is_file())
        files = [f for f in files if not f.is_symlink()]  # last.ckpt
        checkpoint = config_in(self.config).get("ckpt_path")
        resumed = None if checkpoint is None else str(checkpoint)
        if resumed is not None and Path(resumed).is_file():
            files.append(Path(resumed))
        # "last" where there was nothing yet: such a run began from its start, and recorded that.
        began = resumed is None or (not Path(resumed).exists() and self.log.began)
        found = {0: KeptWeights(0, None)} if began else {}
        for file in files:
            version = about(file).get("iteration", 0)
            if version > 0:  # else it holds what the run began with
                found[version] = KeptWeights(version, file)
        return [found[version] for version in sorted(found)]

    def outcomes_with(self, iteration: int) -> dict[int, Outcome]:
        """Return all recorded outcomes by version.

        Raises:
            DataError: if that of ``iteration`` is not among them.
        """
        outcomes = self.log.outcomes()
        if iteration not in outcomes:
            raise DataError(
                f"{self.path} did not record the results of iteration {iteration} (recorded: "
                f"{', '.join(map(str, sorted(outcomes))) or 'none'}); choose one of these"
            )
        return outcomes

    def nearest(self, version: int, latest: int, since: int | None = None) -> KeptWeights:
        """Return kept weights, of at most version ``latest``, from which the version can be
        rebuilt.

        ``since``: those of this version; None: the latest possible.

        Raises:
            DataError: naming what is kept, and what is needed.
        """
        held = self.log.iterations()
        for kept in reversed(self.kept):
            wanted = kept.version == since if since is not None else kept.version <= latest
            if wanted and held.issuperset(range(kept.version + 1, version + 1)):
                return kept
        versions = ", ".join(str(kept.version) for kept in self.kept) or "none"
        begin = "" if since is None else f" from version {since} on"
        hf = (
            "; the exports of HFExport have no optimizer state"
            if (self.path / "hf").exists()
            else ""
        )
        raise DataError(
            f"{self.path}: the weights of version {version} cannot be rebuilt{begin}: the run kept "
            f"versions {versions}, and the rollouts of {self.log.span()}; checkpoints keep "
            "versions (IterationCheckpoint), RerunRecorder the rollouts between one and the "
            f"next{hf}"
        )

    def way(self, kept: KeptWeights, version: int) -> str:
        """Describe the work of rebuilding a version from kept weights, and its time."""
        again = range(kept.version + 1, version + 1)
        if not again:
            return f"version {version}: from {kept}"
        file = self.path / MetricsLog.NAME
        rows = (
            read_rows(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else []
        )
        known = [
            row["time/train"] for row in rows if row["iteration"] in again and "time/train" in row
        ]
        took = (
            f", whose updates took {fsum(known) / len(known) * len(again):.3g} s" if known else ""
        )
        count = "1 iteration is" if len(again) == 1 else f"{len(again)} iterations are"
        return (
            f"version {version}: {count} trained again, from {kept} (version "
            f"{kept.version}) on{took}"
        )

    def rollout(self, rollout_id: str) -> Rollout:
        """Return the recorded rollout of this id.

        Raises:
            DataError: if there is none.
        """
        last = None
        files = recorded_files(self.path)
        others = (found.rollout for file in files for found in file.read())
        for last in chain(self.log.all_rollouts(), others):
            if last.id == rollout_id:
                return last
        example = "no rollouts" if last is None else f"others, such as {last.id!r}"
        raise DataError(
            f"{self.path} holds no rollout {rollout_id!r}, but {example}; "
            f"`lightning-rl rollouts {self.log.path / FILE.format(1, 0)}` lists an iteration's"
        )
