"""StopWhenTold: signals and deadlines end a run, whatever it trains and whether it saves or not."""

import math
import signal
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.errors import RunInterrupted
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.hooks import find_callbacks
from lightning_rl.run.loop.background import runtime
from lightning_rl.run.loop.interrupts import Interrupts
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.slurm import requeue_signal


class WatchesUpdates(RLCallback):
    """A callback that has to know whether an update is under way, and may set a deadline."""

    deadline = math.inf
    """When the run has to stop, in seconds of ``time.monotonic()``."""
    _updating: int | None = None  # the iteration whose update began last

    def within_update(self, trainer: Trainer) -> bool:
        """Return True from the beginning of an iteration's update until it is complete."""
        module = trainer.lightning_module
        return isinstance(module, RecordingModule) and self._updating == module.iteration

    def on_update_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._updating = self.module_of(trainer.lightning_module).iteration

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        # Of a module that announces no update, too.
        if isinstance(trainer.lightning_module, RecordingModule):
            self._updating = trainer.lightning_module.iteration


class StopWhenTold(WatchesUpdates):
    """Stops a run on SIGTERM, SIGUSR1, SIGINT (Ctrl-C), and at ``IterationCheckpoint.max_time``.

    Every run has one. It raises ``RunInterrupted``, on which callbacks that save do so: at once
    while ``fit`` waits for rollouts, rewards or the engine, even if these hang, else after the
    current update; with several processes always after the update, when all ranks agree. A second
    Ctrl-C stops without saving. Evaluations and ``lightning-rl rollout`` stop at once.

    Lightning's own handlers, which save at once in each process, or ignore SIGTERM, are not used.
    """

    def __init__(self) -> None:
        self._interrupts = Interrupts()
        self._listening = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer._signal_connector = _OurHandlers(trainer, self._interrupts)
        self._listening, self._updating = False, None
        if stage != "fit":  # there is nothing to save
            self._listening = True
            self._interrupts.install(lambda: True)

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # From the first sync on: the evaluation after it may hang.
        if trainer.state.fn == "fit":
            self.on_train_start(trainer, pl_module)

    def on_evaluation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_sync_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._listening:
            return
        self._listening = True
        self._interrupts.deadline = min(
            callback.deadline for callback in find_callbacks(trainer, WatchesUpdates)
        )
        alone = trainer.world_size == 1

        def safe() -> bool:
            # While the main thread waits, nothing but the collector's state grows.
            return alone and runtime.is_waiting() and not self.within_update(trainer)

        self._interrupts.install(safe, requeue_signal(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not isinstance(pl_module, RecordingModule) and (reason := self._told_to_any_rank()):
            raise reason

    def on_iteration_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = self.module_of(pl_module)
        module.stopping = self._told_to_any_rank() or module.stopping

    def _told_to_any_rank(self) -> RunInterrupted | None:
        """Return the error to raise, in the same iteration on all ranks, whichever was told."""
        requested = self._interrupts.requested()
        if not dist.any_rank(requested is not None):
            return None
        reasons = dist.gather(None if requested is None else (requested.reason, requested.status))
        number, reason = next((n, r) for n, r in enumerate(reasons) if r is not None)
        return requested or RunInterrupted(f"{reason[0]} to rank {number}", reason[1])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupts.ending = True

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Have checkpoint callbacks, which come after this one, save what was done so far."""
        self._interrupts.ending = True
        if not isinstance(exception, RunInterrupted):
            return
        if not self._listening and trainer.strategy.launcher is not None:
            # Processes that Lightning launched wait for this one, which ends before it began.
            trainer.strategy.launcher.kill(signal.SIGTERM)
        if trainer.state.fn != "fit" or not self._listening:
            return
        if not find_callbacks(trainer, Checkpoint):
            exception.checkpoint = ""
        for saver in find_callbacks(trainer, ModelCheckpoint):
            saver.save_on_exception = True
        number = requeue_signal(trainer)
        savers = [c for c in find_callbacks(trainer, WatchesUpdates) if c is not self]
        if number is not None and exception.status == 128 + number and not savers:
            rank_zero_warn(
                f"the job is not requeued after {exception.reason}: without an IterationCheckpoint "
                "nothing is saved from which it could go on"
            )


class _OurHandlers(_SignalConnector):
    """Lightning's signal connector without its handlers; it removes ours at the run's very end."""

    def __init__(self, trainer: Trainer, interrupts: Interrupts) -> None:
        super().__init__(trainer)
        self._interrupts = interrupts

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    def teardown(self) -> None:
        self._interrupts.remove()
