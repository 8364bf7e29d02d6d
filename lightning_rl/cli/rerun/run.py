"""A run directory as a rerun sees it: configuration, rerun log, checkpoints, rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lightning_rl.config.layers import config_files
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.jsonl import JSONLRollouts
from lightning_rl.rollouts.log import RerunLog
from lightning_rl.run.checkpoint_io import require_good

OTHER_FILES = ("recorded.jsonl", "rollouts.jsonl")
"""Where RolloutRecorder and PreviewTable leave some rollouts, if there is no rerun log."""


@dataclass(frozen=True)
class Source:
    """Weights that were kept: in a checkpoint; if ``path`` is None, those the run began with."""

    version: int
    path: Path | None

    def __str__(self) -> str:
        return "the initial weights" if self.path is None else f"checkpoint {self.path.name}"

    def load(self) -> dict[str, Any]:
        """The checkpoint; nothing that it holds is executed.

        Raises:
            DataError: if it cannot be read.
        """
        assert self.path is not None
        require_good(self.path)
        return load_checkpoint(self.path)


class RecordedRun:
    """What a run left behind.

    Args:
        path: its directory.
        options: of the command line, to build its parts with, such as ``--trusted_only``.

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
                f"{path} is an exported model: weights alone, without the optimizer's state, "
                "rollouts or configuration; name the directory of the run that wrote it"
            )
        if not self.config.is_file():
            raise DataError(
                f"{path} holds no config.yaml, which `lightning-rl fit` leaves in the directory of "
                f"a run that has a logger (working directory: {Path.cwd()}); name that directory"
            )

    def config_of(self, iteration: int) -> tuple[int, Path]:
        """The configuration that an iteration was trained with, and since which iteration."""
        files = config_files(self.path)
        since = max(first for first in files if first <= iteration)
        return since, files[since]

    @cached_property
    def sources(self) -> list[Source]:
        """All weights that were kept, oldest first; checkpoints that are damaged are left out."""
        files = sorted(f for f in self.path.rglob("*.ckpt") if not f.is_symlink())  # last.ckpt
        resumed = yaml.safe_load(self.config.read_text(encoding="utf-8")).get("ckpt_path")
        if resumed is not None and Path(resumed).is_file():
            files.append(Path(resumed))
        found = {} if resumed is not None else {0: Source(0, None)}
        for file in files:
            try:
                version = load_checkpoint(file)["lightning_rl"]["iteration"]
            except DataError:
                continue
            if version > 0:  # else it holds what the run began with
                found[version] = Source(version, file)
        return [found[version] for version in sorted(found)]

    def nearest(self, version: int, latest: int, since: int | None = None) -> Source:
        """The kept weights, of version ``latest`` at most, that recorded iterations lead on from.

        ``since``: those of this version; None: the last that will do.

        Raises:
            DataError: naming what is kept, and what would have to be.
        """
        held = self.log.iterations()
        earliest, _ = self.config_of(latest)  # before, the run was configured otherwise
        for source in reversed(self.sources):
            wanted = source.version == since if since is not None else source.version <= latest
            wanted = wanted and source.version >= earliest
            if wanted and held.issuperset(range(source.version, version)):
                return source
        kept = ", ".join(str(source.version) for source in self.sources) or "none"
        begin = "" if since is None else f" from version {since} on"
        hf = "; what HFExport wrote has no optimizer state" if (self.path / "hf").exists() else ""
        raise DataError(
            f"{self.path}: the weights of version {version} cannot be made again{begin}: kept are "
            f"versions {kept}, and the rollouts of {self.log.span()}; checkpoints keep versions "
            "(IterationCheckpoint), RerunRecorder the rollouts that lead from one to the next"
            f"{hf}"
        )

    def rollout(self, rollout_id: str) -> Rollout:
        """The recorded rollout of this id.

        Raises:
            DataError: if there is none.
        """
        last = None
        for last in self._rollouts():
            if last.id == rollout_id:
                return last
        example = "no rollouts" if last is None else f"others, such as {last.id!r}"
        raise DataError(
            f"{self.path} holds no rollout {rollout_id!r}, but {example}; "
            f"`lightning-rl rollouts {self.log.path}/000000-000.parquet` lists an iteration's"
        )

    def _rollouts(self) -> Iterator[Rollout]:
        yield from self.log.all_rollouts()
        for name in OTHER_FILES:
            if (self.path / name).exists():
                yield from (found.rollout for found in JSONLRollouts(self.path / name).read())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of this library, without unpickling objects.

    Raises:
        DataError: if it is damaged, or something else.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        checkpoint["lightning_rl"]["iteration"]
    except Exception as error:  # torch raises whatever the damaged bytes lead to
        raise DataError(
            f"{path}: no checkpoint of lightning_rl, or damaged ({error!r:.200})"
        ) from (error)
    loaded: dict[str, Any] = checkpoint
    return loaded
