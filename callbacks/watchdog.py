"""Watchdog: stops a run that waits for rollouts that never come, and reports where it hangs."""

import logging
import threading
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, StalledError
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.run.hooks import datamodule_of
from lightning_rl.run.loop.background import TURN_S, runtime
from lightning_rl.run.loop.stacks import describe, where_tasks_wait, where_thread_is

_log = logging.getLogger(__name__)


@configurable
class Watchdog(RLCallback):
    """Stops a waiting run in which no rollout was finished or graded for ``timeout_s`` seconds.

    In environments, it stops a run in which no step was taken, after ``max_step_seconds`` if
    longer.

    The stacks of all threads, and the awaits of each task of the event loop, are written to
    ``watchdog_<rank>.txt`` in the run directory. The run then fails like any other, in the main
    thread: ``IterationCheckpoint`` saves what was collected so far, also if a reward hangs, or the
    engine within a step that blocks the event loop. Every run that collects gets this callback.

    On a CPU with several threads an engine in this process makes its steps in the main thread while
    that waits (:func:`lightning_rl.run.processes.cores.compute`). If a step hangs there, that is
    logged; the run stops as soon as the step is over.

    Args:
        timeout_s: more than the longest time that a single rollout may take, with all its turns, or
            the rewards of its group.

    Raises:
        ConfigError: if the timeout is not above 0.
        StalledError: naming where it hangs, and the file.
    """

    def __init__(self, timeout_s: float = 7200.0) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s} must be > 0 seconds")
        self.timeout_s = timeout_s
        self._end = threading.Event()
        self._data: CollectingDataModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module, data = self.module_of(pl_module), datamodule_of(trainer)
        self._data = data if isinstance(data, CollectingDataModule) else None
        self._end.set()  # a former run's
        self._end = threading.Event()
        # Here, since asking for the run directory may be something that ranks do together.
        file = run_dir(trainer) / f"watchdog_{trainer.global_rank}.txt"
        arguments = (module, file, self._end)
        threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end.set()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end.set()

    def _watch(self, module: RecordingModule, file: Path, end: threading.Event) -> None:
        while not end.wait(min(self.timeout_s / 4, 5.0)):
            # A push has time limits of its own.
            if module.clock.stage != "sync" and runtime.stalled_seconds() > self.timeout_s:
                self._stop(module, file)
                return

    def _stop(self, module: RecordingModule, file: Path) -> None:
        loop, thread = runtime.loop, runtime.thread
        assert thread is not None
        blocked = runtime.abandon_blocked_loop(min(self.timeout_s, TURN_S))
        data = self._data
        hanging = None if data is None else data.hanging()
        file.write_text(describe(loop), encoding="utf-8")
        what, advice = "generation", "If a rollout may take that long"
        if module.clock.stage == "reward":
            what, advice = "grading", "If a reward may take that long"
        # It has been at it since before the wait: later steps are not made there.
        computing, engine = runtime.main_calls.busy, runtime.abandon_engine_call()
        if computing:
            where = f"{what} hangs in the main thread at {where_thread_is(threading.main_thread())}"
        elif hanging is not None and not blocked:
            where = f"{hanging.what} hangs at {where_thread_is(hanging.thread)}"
            advice = hanging.advice
        elif blocked:
            where = f"{what} hangs and blocks the event loop at {where_thread_is(thread)}"
        elif engine is not None:
            where = f"{what} hangs beside the event loop at {where_thread_is(engine)}"
        else:
            where = f"{what} hangs and waits at {where_tasks_wait(loop)}"
        error = StalledError(
            f"no {'rollout' if data is None else data.collects} was finished for "
            f"timeout_s={self.timeout_s:g} seconds: {where}; all stacks are in {file}. {advice}, "
            "raise timeout_s of Watchdog"
        )
        if computing:  # where nothing can be raised now
            _log.error("%s", error)
        runtime.abandon_wait(error)
