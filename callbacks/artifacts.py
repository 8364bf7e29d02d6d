"""RunArtifacts: uploads a run's files with its loggers; and how W&B's are fetched again."""

import os
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line
from lightning_rl.errors import ConfigError
from lightning_rl.run.files.rundir import run_dir

FILES = ("summary.json", "curves.png", "config*.yaml", "metrics.jsonl", "rollouts.jsonl")


@singledispatch
def keep_files(logger: Logger, directory: Path, files: Sequence[Path]) -> None:
    """Hand files of the run directory to a logger; by default this does nothing.

    ``WandbLogger`` and ``MLFlowLogger`` have a file store. For another class of logger register a
    function: ``@keep_files.register``.
    """


@keep_files.register
def _(logger: WandbLogger, directory: Path, files: Sequence[Path]) -> None:
    import wandb

    artifact = wandb.Artifact(_artifact(logger.experiment.id), type="results")
    for file in files:
        artifact.add_file(str(file), name=file.relative_to(directory).as_posix())
    logger.experiment.log_artifact(artifact)


@keep_files.register
def _(logger: MLFlowLogger, directory: Path, files: Sequence[Path]) -> None:
    for file in files:
        folder = file.relative_to(directory).parent.as_posix()
        logger.experiment.log_artifact(logger.run_id, str(file), None if folder == "." else folder)


def _artifact(run: str) -> str:
    return f"results-{run}"


@singledispatch
def continue_as(logger: Logger, run: str) -> None:
    """Let a logger record a run under the run's own id, also when it is resumed.

    By default this does nothing; a ``WandbLogger`` without an id gets this one.
    """


@continue_as.register
def _(logger: WandbLogger, run: str) -> None:
    if logger.version is None and "WANDB_RUN_ID" not in os.environ:
        logger._id = logger._wandb_init["id"] = run  # it resumes the id where there is one


def fetch_files(run: str, directory: Path, last: str) -> None:
    """Download the newest files that a ``WandbLogger`` kept of a run.

    Args:
        run: the run's path at W&B, ``entity/project/id``.
        directory: where the files go.
        last: the name of the file that is put there last, once all others are.

    Raises:
        ConfigError: if W&B does not give them.
    """
    project, _, run_id = run.rpartition("/")
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory, prefix=".fetched-") as fetched:
        try:
            import wandb

            artifact = wandb.Api().artifact(f"{project}/{_artifact(run_id)}:latest", type="results")
            artifact.download(root=fetched)
        except Exception as error:  # of its own classes, of requests, or a missing package
            raise ConfigError(
                f"W&B does not give the files of the run {run!r} ({type(error).__name__}: "
                f"{one_line(error)}); it must be ENTITY/PROJECT/ID, wandb installed and "
                "WANDB_API_KEY set"
            ) from error
        found = [path for path in Path(fetched).rglob("*") if path.is_file()]
        for path in sorted(found, key=lambda path: path.name == last):
            path.replace(directory / path.name)


@configurable
class RunArtifacts(RLCallback):
    """Hands files of the run directory to W&B and MLflow when a run ends, also when it fails.

    It runs after ``RunReport`` has written its files. Other loggers need nothing: the files are in
    the run directory. If a logger fails to upload them, that is a warning.

    Args:
        files: patterns relative to the run directory (``hf/*`` is an exported model); None: the
            files of ``RunReport`` and ``PreviewTable``, and the configuration.

    Raises:
        ConfigError: if there is no pattern, or one is not inside the run directory.
    """

    def __init__(self, files: list[str] | None = None) -> None:
        self.files = list(FILES if files is None else files)
        if not self.files:
            raise ConfigError(
                "RunArtifacts(files=[]) has no files to upload; add patterns, or remove it"
            )
        for pattern in self.files:
            if not pattern or PurePath(pattern).is_absolute() or ".." in PurePath(pattern).parts:
                raise ConfigError(
                    f"RunArtifacts: files: {pattern!r} must be inside the run directory; write it "
                    "relative to that, such as summary.json or hf/*"
                )

    def on_report_written(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        directory = run_dir(trainer)
        found = [path for pattern in self.files for path in sorted(directory.glob(pattern))]
        files = [path for path in dict.fromkeys(found) if path.is_file()]
        for logger in trainer.loggers if files else ():
            try:
                keep_files(logger, directory, files)
            except Exception as error:  # a server out of reach; the files themselves are safe
                rank_zero_warn(
                    f"{type(logger).__name__} could not upload the files of the run "
                    f"({type(error).__name__}: {error}); they are in {directory}"
                )
