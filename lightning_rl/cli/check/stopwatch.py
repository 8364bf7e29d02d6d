"""The process that ``check --layout`` starts for each layout: it trains, and notes the time."""

import json
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks import RLCallback, StepTimer
from lightning_rl.cli.check.scratch import Built
from lightning_rl.datamodule import RLDataModule
from lightning_rl.run.dist import any_rank
from lightning_rl.run.hooks import callbacks_of, find_callbacks

TIMED = "--time_iterations"
"""Of ``check``, and nobody's but ``--layout``'s: then the file for what was measured."""

WARM_UP, MOST, SECONDS = 1, 13, 4.0
"""Iterations that do not count; at most so many with them, and no more after so many seconds."""


class Stopwatch(RLCallback):
    """Notes what each iteration took, and ends the run when that is enough."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        if "time/iteration" not in metrics:  # before training
            return
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        self.rows.append({name.removeprefix("time/"): value for name, value in times.items()})
        measured = sum(row["iteration"] for row in self.rows[WARM_UP:])
        trainer.should_stop = any_rank(trainer.should_stop or measured >= SECONDS)


def time_iterations(file: Path, arguments: list[str], scratch: str) -> int:
    """Train as ``fit`` with these arguments would, for a few iterations; rank 0 notes their times.

    With all callbacks; of held-out prompts they get one, since evaluations do not count.
    """
    cli = Built(arguments, scratch, fast_dev_run=MOST)
    data, trainer = cli.datamodule, cli.trainer
    assert isinstance(data, RLDataModule)
    data.iterations_per_epoch, data.eval_limit = MOST, 1
    stopwatch = Stopwatch()
    timers = [] if find_callbacks(trainer, StepTimer) else [StepTimer()]
    callbacks_of(trainer).extend([*timers, stopwatch])
    trainer.fit(cli.model, datamodule=data)
    if trainer.is_global_zero:
        file.write_text(json.dumps(stopwatch.rows[WARM_UP:]))
    return 0
