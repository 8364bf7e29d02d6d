"""IterationCheckpoint: saves checkpoints from which a run can resume, whatever stopped it."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from tensordict import TensorDict

from lightning_rl.callbacks.ranking import Ranked, ranked, require_mode, retained
from lightning_rl.callbacks.stopping import WatchesUpdates
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import (
    CheckpointError,
    ConfigError,
    RunInterrupted,
    local_path,
    require_at_least,
)
from lightning_rl.learn.base import RecordingModule
from lightning_rl.models.model_checks import require_finite_weights
from lightning_rl.run.files.checkpoint_folders import save_folder, writes_folders
from lightning_rl.run.files.checkpoint_io import (
    BackgroundCheckpointIO,
    checkpoints_in,
    newest_good,
)
from lightning_rl.run.files.folders import link_to, remove
from lightning_rl.run.files.newest_run import continue_newest_run
from lightning_rl.run.files.resume import (
    enter_run,
    require_one_start,
    run_id_of,
    tell_of_beginning,
)
from lightning_rl.run.files.rundir import hold, output_path
from lightning_rl.run.hooks import call_hook
from lightning_rl.run.loop.background import runtime
from lightning_rl.run.loop.interrupts import seconds_of
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.peers import lost_peer
from lightning_rl.run.processes.slurm import requeue_job, requeue_signal


@configurable
class IterationCheckpoint(ModelCheckpoint, WatchesUpdates):
    """Saves every N iterations, at the end, when a run fails, and when it is told to stop.

    See :class:`StopWhenTold` for what tells it. Rollouts collected so far are saved too. Under
    ``srun`` the job is requeued after SIGUSR1, as Lightning would do, if the run resumes with
    ``last``.

    Loggers are told of each checkpoint, so that ``WandbLogger(log_model="all")`` uploads it.

    Files are ``checkpoints/iteration_<n>.ckpt`` in the run directory, and the links ``last.ckpt``
    and ``best.ckpt``. ``ckpt_path="last"`` loads the newest intact one, and continues in its run
    directory. Lightning's ``ModelCheckpoint`` counts optimizer steps; this counts iterations.

    Args:
        every_n_iterations: how often to save; 0: only at the end, when the run fails or is stopped,
            and the best of ``monitor``.
        keep_last: how many of these to keep.
        monitor: a metric such as ``eval/accuracy``, whose best checkpoints are kept too; it is
            compared in iterations that recorded it; see ``early_stopping.KnownMonitors``.
        keep_best: how many of the best to keep; among equals, the newest.
        mode: ``max`` or ``min``, which values of ``monitor`` are good.
        dirpath: another local directory; None: in the run directory. ``ModelCheckpoint`` takes a
            URL.
        max_time: ``DD:HH:MM:SS`` from the creation of this object, after which to save and stop.
        asynchronous: write in the background, from a copy in host memory; the end of the run waits
            for it.

    Raises:
        ConfigError: if a value is out of range, or the module counts no iterations.
        CheckpointError: if a checkpoint cannot be written, or all are damaged.
        NonFiniteWeightsError: if the weights are NaN or infinite; earlier checkpoints stay.
        RunInterrupted: after saving.
    """

    def __init__(
        self,
        every_n_iterations: int = 10,
        keep_last: int = 2,
        monitor: str | None = None,
        keep_best: int = 1,
        mode: str = "max",
        dirpath: str | None = None,
        max_time: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        require_at_least(0, every_n_iterations=every_n_iterations)
        require_at_least(1, keep_last=keep_last, keep_best=keep_best)
        require_mode(mode)
        if dirpath is not None:
            local_path(dirpath, "IterationCheckpoint.dirpath")
        # Never by Lightning's own triggers; it is a ModelCheckpoint so that "last" and "best" work.
        super().__init__(dirpath, monitor=monitor, mode=mode, every_n_epochs=0)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.asynchronous = asynchronous
        self.saved: list[str] = []
        """Names of this run's checkpoint files, oldest first."""
        self.best: Ranked = []
        """Values of ``monitor`` with their checkpoint files, best first."""
        self._given = None if dirpath is None else Path(str(self.dirpath))
        if max_time is not None:
            self.deadline = time.monotonic() + seconds_of(max_time)
        self._announced: set[str] = set()  # of ``saved``, those that loggers know of
        self._training = False
        self._fresh = True  # nothing happened since the last save
        self._asked_for_last = False
        self._source = Path()  # the folder of the checkpoint from which the run goes on

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._directory = output_path(trainer, self._given, "checkpoints")
        if stage != "fit":
            return
        if not isinstance(pl_module, RecordingModule):
            raise ConfigError(
                f"IterationCheckpoint counts RL iterations, but {type(pl_module).__name__} has "
                "none; use ModelCheckpoint"
            )
        require_one_start(pl_module.going_on_from)
        strategy = trainer.strategy
        if self.asynchronous and not isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
            strategy.checkpoint_io = BackgroundCheckpointIO(strategy.checkpoint_io)
        self.dirpath = str(self._directory)
        if self._directory == self._given:
            with dist.every_rank():
                if dist.rank() == 0:  # until the process ends
                    self._directory.mkdir(parents=True, exist_ok=True)
                    hold(self._directory)
        if trainer.is_global_zero:
            for left in self._directory.glob("*.ckpt.partial"):  # by a killed run
                remove(left)

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # From the first sync on: the evaluation after it may hang.
        if trainer.state.fn == "fit":
            self._begin(trainer, pl_module)

    def on_evaluation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_sync_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the run, unless it already did; from then on there is something to save."""
        if self._training:
            return
        module = self.module_of(pl_module)
        self._training = self._fresh = True
        module.run_id = enter_run(trainer, module, self._directory)

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fresh = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._fresh = False

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        super().on_update_start(trainer, pl_module, batch)
        self._fresh = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = self.module_of(pl_module)
        if not module.iteration_ended:
            return
        is_best = self._rank(module)
        every = self.every_n_iterations
        if is_best or (every and module.iteration % every == 0):
            self._save(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._fresh:
            self._save(trainer, self.module_of(pl_module))
        self._finish(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn != "fit":
            return
        lost = lost_peer(exception)  # now, while the others look, too
        if lost is not None:
            exception.add_note(str(lost))
        if not self._training:
            return
        module, self._training = self.module_of(pl_module), False
        # All ranks were told to stop. Launchers end the others once one of them has ended.
        together = isinstance(exception, RunInterrupted)
        try:
            with dist.every_rank() if together else nullcontext():
                if self._may_save(trainer, module, exception):
                    # Else saving rollouts in flight would wait forever.
                    runtime.abandon_blocked_loop()
                    self._save(trainer, module)
                self._finish(trainer)
                call_hook(trainer, "on_report_written")  # RerunRecorder seals this checkpoint, too
                self._requeue(trainer, exception)
        except CheckpointError as error:  # what stopped the run comes first
            rank_zero_warn(str(error))
        if isinstance(exception, RunInterrupted):
            exception.checkpoint = self.last_model_path
        elif self.last_model_path:
            rank_zero_info(f"The run failed; its last checkpoint is {self.last_model_path}")

    def _requeue(self, trainer: Trainer, exception: BaseException) -> None:
        """Under Slurm, after its signal: requeue the job, now that all ranks have saved."""
        number = requeue_signal(trainer)
        if number is None or not isinstance(exception, RunInterrupted):
            return
        if exception.status == 128 + number:
            requeue_job(trainer, goes_on=self._asked_for_last)

    # ---------------------------------------------------------------- saving

    def _may_save(
        self, trainer: Trainer, module: RecordingModule, exception: BaseException
    ) -> bool:
        if self._fresh or isinstance(exception, CheckpointError | KeyboardInterrupt):
            return False
        if self.within_update(trainer):  # the optimizer may have stepped or not
            rank_zero_warn(
                f"the run failed within the update of iteration {module.present_iteration}, so its "
                "state is not saved; resume from the checkpoint before"
            )
            return False
        # An error is one process's own; the others would wait for it in vain.
        return trainer.world_size == 1 or isinstance(exception, RunInterrupted)

    def _save(self, trainer: Trainer, module: RecordingModule) -> None:
        before, name = self.saved, f"iteration_{module.iteration}.ckpt"
        require_finite_weights(module, f"saved as {self._directory / name}")
        self.saved = [*(old for old in before if old != name), name]
        try:
            if writes_folders(trainer):
                save_folder(trainer, self._directory / name)
            else:
                trainer.save_checkpoint(self._directory / name, weights_only=False)
        except CheckpointError:
            self.saved = before
            raise
        self._fresh = True
        self._tidy(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the write in progress."""
        self._training = False
        trainer.strategy.checkpoint_io.teardown()
        self._tidy(trainer)

    def _rank(self, module: RecordingModule) -> bool:
        """Add this iteration to the best if it is among them; returns whether it is."""
        value = None if self.monitor is None else module.recorded.get(self.monitor)
        name = f"iteration_{module.iteration}.ckpt"
        self.best = ranked(self.best, value, name, self.keep_best, self.mode)
        return (value, name) in self.best

    def _tidy(self, trainer: Trainer) -> None:
        """Delete files that are neither among the last nor the best, and update the links."""
        there, best, kept = retained(self._directory, self.saved, self.best, self.keep_last)
        self.last_model_path = str(self._directory / there[-1]) if there else ""
        self.best_model_path = str(self._directory / best[0]) if best else ""
        if trainer.is_global_zero:
            self._announce(trainer, there)
            for name in there:
                if name not in kept:
                    remove(self._directory / name)
            for link, names in (("last.ckpt", there[-1:]), ("best.ckpt", best[:1])):
                for name in names:
                    link_to(self._directory / link, name)
        self.saved = [name for name in self.saved if name in kept or name not in there]

    def _announce(self, trainer: Trainer, there: list[str]) -> None:
        """Tell loggers of new checkpoints, as ``ModelCheckpoint`` does: those with ``log_model``
        upload them.
        """
        new, self._announced = set(there) - self._announced, set(there)
        if not new:
            return
        scores = {name: torch.tensor(value) for value, name in self.best}
        self.current_score = scores.get(there[-1])
        self.best_k_models = {
            str(self._directory / name): score for name, score in scores.items() if name in there
        }
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        for logger in trainer.loggers:
            logger.after_save_checkpoint(proxy(self))

    # ---------------------------------------------------------------- going on

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved, "best": self.best}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._source = Path(str(trainer.ckpt_path)).absolute().parent

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._directory.exists():  # else another run begins from that checkpoint
            there = {path.name for path in checkpoints_in(self._directory)}
            self.saved = [name for name in state_dict["saved"] if name in there]
            # Those of a run that is resumed in another directory stay where they are.
            best = [
                (value, name if name in there else str(self._source / name))
                for value, name in state_dict["best"]
            ]
            self.best = [(value, name) for value, name in best if (self._directory / name).exists()]
            self.last_model_path = str(self._directory / self.saved[-1]) if self.saved else ""
            self._announced = set(self.saved)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Return the checkpoints that Lightning should consider for ``ckpt_path="last"``."""
        self._asked_for_last = True
        if self._given is None:
            continue_newest_run(trainer)
        directory = output_path(trainer, self._given, "checkpoints")
        found = newest_good(directory, run_id_of(directory))
        if found is None:
            tell_of_beginning(trainer, directory)
            return set()
        module = trainer.lightning_module
        if trainer.state.fn == "fit" and isinstance(module, RecordingModule):
            module.going_on_from = found
        return {str(found)}
