"""The newest run, in which ``ckpt_path="last"`` continues instead of beginning a new one."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_rl.run.files.checkpoint_io import checkpoints_in
from lightning_rl.run.files.rundir import continue_in, own_runs, require_free


def continue_newest_run(trainer: Trainer) -> None:
    """Continue in the newest folder that holds a checkpoint; otherwise a new run begins.

    Raises:
        ConfigError: if another process is using that folder.
    """
    own = own_runs(trainer)
    if own is not None:
        newest = newest_run(own)
        if newest is not None:
            _require_free(trainer, newest)
            continue_in(trainer, newest)
        return
    loggers = [
        logger
        for logger in trainer.loggers
        if isinstance(logger, TensorBoardLogger | CSVLogger) and _is_open(logger)
    ]
    if not loggers or loggers[0] is not trainer.logger:
        return  # the run directory is fixed
    newest = newest_run(Path(loggers[0].save_dir or ".") / (loggers[0].name or ""))
    if newest is None:
        return
    _require_free(trainer, newest)
    version = int(newest.name.removeprefix("version_"))
    for logger in loggers:
        logger._version = version
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            _set_aside(Path(logger.log_dir) / "metrics.csv")


def newest_run(runs: Path) -> Path | None:
    """Return the highest ``runs/version_<n>`` that holds a checkpoint."""
    begun = [
        directory.parent
        for directory in runs.glob("version_*/checkpoints")
        if checkpoints_in(directory) and directory.parent.name[8:].isdigit()
    ]
    return max(begun, key=lambda directory: int(directory.name[8:]), default=None)


def _is_open(logger: TensorBoardLogger | CSVLogger) -> bool:
    """Return True if the logger's version is unset, or was not chosen by the user.

    A callback that asked for the folder before, as ``ModelCheckpoint`` does, has only drawn the
    next number. Under Slurm, Lightning's default logger uses the job's id, which changes when the
    job is submitted again.
    """
    version = logger._version
    return version is None or (
        not Path(logger.log_dir).exists()
        and version in (logger._get_next_version(), SLURMEnvironment.job_id())
    )


def _require_free(trainer: Trainer, directory: Path) -> None:
    if trainer.state.fn in (None, "fit"):  # None: it is about to fit
        require_free(directory)


def _set_aside(path: Path) -> None:
    """Rename an earlier file, which Lightning's CSVLogger would delete."""
    if path.exists():
        number = sum(1 for _ in path.parent.glob(f"{path.stem}_before_*{path.suffix}")) + 1
        path.rename(path.with_name(f"{path.stem}_before_{number}{path.suffix}"))
