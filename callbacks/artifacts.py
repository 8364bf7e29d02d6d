"""RunArtifacts: uploads a run's files with its loggers."""

from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path, PurePath

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.arguments import configurable
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

    artifact = wandb.Artifact(f"results-{logger.experiment.id}", type="results")
    for file in files:
        artifact.add_file(str(file), name=file.relative_to(directory).as_posix())
    logger.experiment.log_artifact(artifact)


@keep_files.register
def _(logger: MLFlowLogger, directory: Path, files: Sequence[Path]) -> None:
    for file in files:
        folder = file.relative_to(directory).parent.as_posix()
        logger.experiment.log_artifact(logger.run_id, str(file), None if folder == "." else folder)


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
