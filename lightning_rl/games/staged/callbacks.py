"""StagedCallback: the hooks of a staged run, and StagedLoggers, which uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.callbacks.artifacts import continue_as, keep_files
from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line
from lightning_rl.games.staged.sampler import Tree
from lightning_rl.games.staged.state import StagedState

STATE_FILES = ("state.json", "config.yaml", "metrics.jsonl")
"""The files needed to resume a run, except interactions of an unfinished iteration."""
RESULTS = ("summary.json", "curves.png", "rollouts.*", "tests.*")


class StagedRun(Protocol):
    """The part of a :class:`StagedTrainer` that its callbacks may rely on.

    It stands here because the trainer imports this file, and must not be imported by it.
    """

    run_dir: Path
    state: StagedState


class StagedCallback:
    """Hooks of a :class:`StagedTrainer`; the default ones do nothing."""

    def on_run_start(self, trainer: StagedRun) -> None:
        """Called once ``trainer.state`` was read, or begun, before the run's first stage."""

    def statistics(
        self, trainer: StagedRun, of: str, iteration: int, trees: Sequence[Tree]
    ) -> dict[str, float]:
        """Return further metrics of interactions; the part before the slash is added to their
        names.

        Args:
            trainer: the run.
            of: ``train`` or ``eval``, which is prepended to the names.
            iteration: the iteration of the models that had the interactions.
            trees: the interactions; ``leaf.conversation`` of each tree's ``leaves`` has turns,
                rewards and decisions.
        """
        return {}

    def on_metrics(self, trainer: StagedRun, iteration: int, metrics: dict[str, float]) -> None:
        """Called once metrics of the models after ``iteration`` iterations are in
        ``metrics.jsonl``.
        """

    def on_stage_end(self, trainer: StagedRun, stage: str) -> None:
        """Called after a stage; ``trainer.state``, which was saved, names the next one."""

    def on_run_end(self, trainer: StagedRun, error: BaseException | None) -> None:
        """Called when the run is done, or when ``error`` ends it."""


@configurable
class StagedLoggers(StagedCallback):
    """Sends metrics by iteration to Lightning's loggers, and files to those that store them.

    Loggers that store files (W&B, MLflow) get the state after each iteration, and at the end with
    the results. W&B records a resumed run under the id that it had, the run's own unless the logger
    has another. A logger that cannot be reached causes a warning, and does not end the run.

    Args:
        loggers: any of Lightning's loggers.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = loggers

    def on_run_start(self, trainer: StagedRun) -> None:
        for logger in self.loggers:
            continue_as(logger, trainer.state.run)

    def on_metrics(self, trainer: StagedRun, iteration: int, metrics: dict[str, float]) -> None:
        for logger in self.loggers:
            try:
                logger.log_metrics(metrics, step=iteration)
                logger.save()
            except Exception as error:  # a server out of reach; metrics.jsonl has them
                _warn(logger, "the metrics", trainer, error)

    def on_stage_end(self, trainer: StagedRun, stage: str) -> None:
        if stage == "await_fine_tune_jobs":
            self._keep(trainer, STATE_FILES)

    def on_run_end(self, trainer: StagedRun, error: BaseException | None) -> None:
        self._keep(trainer, (*STATE_FILES, *RESULTS))
        for logger in self.loggers:
            try:
                logger.finalize("success" if error is None else "failed")
            except Exception as fault:
                _warn(logger, "that the run ended", trainer, fault)

    def _keep(self, trainer: StagedRun, patterns: Sequence[str]) -> None:
        directory = trainer.run_dir
        found = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
        files = [path for path in found if path.is_file()]
        for logger in self.loggers if files else ():
            try:
                keep_files(logger, directory, files)
            except Exception as error:
                _warn(logger, "the files of the run", trainer, error)


def _warn(logger: Logger, what: str, trainer: StagedRun, error: Exception) -> None:
    rank_zero_warn(
        f"{type(logger).__name__} failed to record {what} ({type(error).__name__}: "
        f"{one_line(error)}); the run's own files are in {trainer.run_dir}"
    )
