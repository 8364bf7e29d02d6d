"""Where a run leaves its files."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl import dist
from lightning_rl.disk import append, require_writable

OWN_RUNS = "lightning_rl_runs"
"""Where in ``default_root_dir`` runs are that no logger has a directory for."""

_known: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_own: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()
_scratch: WeakKeyDictionary[Trainer, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def run_dir(trainer: Trainer) -> Path:
    """Where a run's results go; created.

    That is the directory of the first logger, if it is a ``TensorBoardLogger`` or ``CSVLogger``,
    which begin a new one for every run. Otherwise it is ``lightning_rl_runs/version_<n>`` in
    ``default_root_dir``. Of a fast dev run it is a scratch directory, which is deleted at the end.

    On several ranks it is rank 0's. They all have to make the first call, since it asks rank 0
    (the data modules do, first thing in ``setup``); later calls may be made by any.
    """
    directory = _known.get(trainer)
    if directory is None:
        directory = _choose(trainer)
        if dist.world_size() == trainer.world_size:  # else the ranks cannot talk yet
            directory = _known[trainer] = Path(trainer.strategy.broadcast(str(directory)))
            directory.mkdir(parents=True, exist_ok=True)
    return directory


def require_writable_dirs(trainer: Trainer) -> None:
    """Check the directories that a run will write to, before a logger fails with a bare error.

    Raises:
        ConfigError: naming the first that cannot be written.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    for logger in trainer.loggers:
        if logger.save_dir is not None and "://" not in str(logger.save_dir):
            require_writable(Path(logger.save_dir), "trainer.logger.save_dir")
    if "://" not in str(trainer.default_root_dir):
        require_writable(Path(trainer.default_root_dir), "trainer.default_root_dir")


def output_path(trainer: Trainer, given: str | Path | None, name: str) -> Path:
    """``given``, where a user chose a place of his own; else ``name`` in the run directory.

    A fast dev run leaves the user's own files alone, and takes the run directory for them too.
    """
    if given is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        return Path(given)
    return run_dir(trainer) / name


def own_runs(trainer: Trainer) -> Path | None:
    """The folder of the runs that no logger has a directory for; None where one has."""
    if isinstance(trainer.logger, TensorBoardLogger | CSVLogger):
        return None
    return Path(trainer.default_root_dir) / OWN_RUNS


def continue_in(trainer: Trainer, directory: Path) -> None:
    """Let a run go on in the directory of an earlier one, which is among ``own_runs``."""
    _own[trainer] = directory


def _choose(trainer: Trainer) -> Path:
    """This rank's own idea of where the run directory is; rank 0 creates it."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return _scratch_directory(trainer)
    runs = own_runs(trainer)
    if runs is None:
        directory = Path(trainer.logger.log_dir)  # type: ignore[union-attr, arg-type]
    elif trainer in _own:
        directory = _own[trainer]
    else:
        directory = _next_version(runs)
        while trainer.is_global_zero:  # another run may take the same one right now
            try:
                directory.mkdir(parents=True)
                break
            except FileExistsError:
                directory = _next_version(runs)
        _own[trainer] = directory
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def _next_version(runs: Path) -> Path:
    taken = [int(path.name[8:]) for path in runs.glob("version_*") if path.name[8:].isdigit()]
    return runs / f"version_{max(taken, default=-1) + 1}"


def _scratch_directory(trainer: Trainer) -> Path:
    if trainer not in _scratch:
        _scratch[trainer] = tempfile.TemporaryDirectory(prefix="lightning_rl_fast_dev_run_")
        rank_zero_info(
            "fast_dev_run keeps nothing: checkpoints, reports, exports and rollouts go to "
            f"{_scratch[trainer].name}, which is deleted at the end"
        )
    return Path(_scratch[trainer].name)


class RunLines:
    """A file of JSON lines in the run directory, as long as the run has got.

    What a killed run had written behind the checkpoint it is resumed from is taken back, for it is
    going to be written again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bytes = 0
        self._resumed = False

    def begin(self, trainer: Trainer) -> None:
        """Call it in ``setup``, on every rank: a run that begins anew adds to what is there."""
        file = run_dir(trainer) / self._name
        self._bytes = file.stat().st_size if file.exists() else 0
        self._resumed = False

    def append(self, trainer: Trainer, records: Iterable[dict[str, Any]]) -> None:
        """Write records; values that JSON does not know become text.

        Raises:
            DiskError: if they cannot be written; then none of them is.
        """
        lines = (json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records)
        file = run_dir(trainer) / self._name
        # In another directory than the checkpoint's run there is nothing to take back.
        if self._resumed and file.exists() and file.stat().st_size > self._bytes:
            os.truncate(file, self._bytes)
        self._resumed = False
        self._bytes = append(file, "".join(lines))

    def state_dict(self) -> dict[str, Any]:
        """How long the file is, as primitives."""
        return {"bytes": self._bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""
        self._bytes, self._resumed = state["bytes"], True
