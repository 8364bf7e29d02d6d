"""Watchdog: a run that waits for rollouts that never come says where they hang, and stops."""

import threading
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.collect.loop import (
    abandon_wait,
    background_loop,
    loop_thread,
    replace_loop,
    stalled_seconds,
)
from lightning_rl.errors import ConfigError, StalledError
from lightning_rl.hooks import RLCallback
from lightning_rl.module import PolicyModule
from lightning_rl.rundir import run_dir
from lightning_rl.stacks import describe, where_tasks_wait, where_thread_is

STAGES = ("generate", "eval")
"""In the others something else is waited for: rewards have timeouts of their own."""


class Watchdog(RLCallback):
    """Stops a run in which no rollout came to an end for ``timeout_s`` while it waits for some.

    The stacks of all threads, and what each task of the event loop awaits, go to
    ``watchdog_<rank>.txt`` in the run directory. The run then fails like any other, in the main
    thread: ``IterationCheckpoint`` saves what was collected so far, also if the engine hangs within
    a step and blocks the event loop. The command line adds this callback to every run that
    generates.

    Args:
        timeout_s: more than the longest that a single rollout may take, all its turns included.

    Raises:
        ConfigError: for a timeout that is not above 0.
        StalledError: naming where it hangs, and the file.
    """

    def __init__(self, timeout_s: float = 7200.0) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s} must be > 0 seconds")
        self.timeout_s = timeout_s
        self._end = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, PolicyModule)
        self._end.set()  # a former run's
        self._end = threading.Event()
        # Here, since asking for the run directory may be something that ranks do together.
        file = run_dir(trainer) / f"watchdog_{trainer.global_rank}.txt"
        arguments = (pl_module, file, self._end)
        threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end.set()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end.set()

    def _watch(self, module: PolicyModule, file: Path, end: threading.Event) -> None:
        while not end.wait(min(self.timeout_s / 4, 5.0)):
            if module.clock.stage in STAGES and stalled_seconds() > self.timeout_s:
                self._stop(file)
                return

    def _stop(self, file: Path) -> None:
        loop, thread = background_loop(), loop_thread()
        assert thread is not None
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        turns = turned.wait(min(self.timeout_s, 5.0))
        where = where_tasks_wait(loop) if turns else where_thread_is(thread)
        file.write_text(describe(loop), encoding="utf-8")
        if not turns:  # else saving what was collected would wait for it too
            replace_loop()
        how = "and waits" if turns else "and blocks the event loop"
        abandon_wait(
            StalledError(
                f"no rollout came to an end for timeout_s={self.timeout_s:g} seconds: generation "
                f"hangs {how} at {where}; all stacks are in {file}. If a rollout may take that "
                "long, raise timeout_s of Watchdog"
            )
        )
