"""Define points at which a run is killed, and the callback that kills it there."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.kill.runs import ITERATIONS, PER_EPOCH, run_command
from lightning_rl.callbacks import RLCallback

STAGES = ("collect", "backward", "between_steps", "save", "epoch_end", "any")
SUPERVISED = ("backward", "within_a_step", "save", "validation", "epoch_end", "any")
"""The stages of supervised training, whose iterations are optimizer steps of several batches."""
AT_EPOCH_ENDS = ("epoch_end", "validation")


class KillSelf(RLCallback):
    """Ends the process with SIGKILL in a stage of an iteration (0 is the first).

    ``after`` is a share of the stage: how many optimizer steps, or how much of the seconds given.
    """

    def __init__(self, stage: str, iteration: int, after: float, seconds: float) -> None:
        self.stage, self.iteration, self.after, self.seconds = stage, iteration, after, seconds
        self.steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "any":
            self._later(self.after * self.seconds)

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "collect" and self._now(pl_module):
            self._later(self.after * self.seconds)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        later = batch_idx % trainer.accumulate_grad_batches > 0  # gradients were accumulated
        if self.stage == "within_a_step" and later and self._now(pl_module):
            kill()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.stage == "validation" and pl_module.iteration == self.iteration + 1:
            kill()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "backward" and self._now(pl_module):
            kill()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.stage == "between_steps" and self._now(pl_module):
            self.steps += 1
            if self.steps == 2:  # the first one is done
                kill()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.stage == "save" and pl_module.iteration == self.iteration + 1:
            directory = Path(trainer.log_dir or ".") / "checkpoints"
            threading.Thread(target=kill_while_saving, args=[directory], daemon=True).start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "epoch_end" and pl_module.iteration == self.iteration + 1:
            kill()

    def _now(self, module: LightningModule) -> bool:
        return bool(module.iteration == self.iteration)

    def _later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving(directory: Path) -> None:
    """Kill the process as soon as a part of a checkpoint is on disk."""
    while not any(p.stat().st_size > 0 for p in directory.glob("*.ckpt.partial") if p.exists()):
        time.sleep(1e-4)
    kill()


@dataclass
class Point:
    """The point at which one run is killed."""

    stage: str
    iteration: int
    after: float


def draw_points(count: int, seed: int, stages: Sequence[str] = STAGES) -> list[Point]:
    """Draw points: all stages in turn, with iteration and moment at random."""
    rng = random.Random(seed)
    points = []
    for number in range(count):
        stage = stages[number % len(stages)]
        epoch_ends = range(PER_EPOCH - 1, ITERATIONS, PER_EPOCH)
        iterations = epoch_ends if stage in AT_EPOCH_ENDS else range(ITERATIONS)
        points.append(Point(stage, rng.choice(list(iterations)), rng.random()))
    return points


def armed(config: dict[str, Any], point: Point, seconds: float = 0.0) -> dict[str, Any]:
    """Return the run that kills itself at a point."""
    arguments = {"stage": point.stage, "iteration": point.iteration, "after": point.after,
                 "seconds": seconds}  # fmt: skip
    killer = {"class_path": "benchmarks.kill.killer.KillSelf", "init_args": arguments}
    # First of all, so that its hooks come before the others' work, but for what they kill within.
    changed: dict[str, Any] = json.loads(json.dumps(config))
    changed["trainer"]["callbacks"].insert(0, killer)
    return changed


def killed_and_resumed(config: dict[str, Any], out: Path, point: Point, seconds: float) -> int:
    """Kill a run at a point and let it go on to its end; how many starts that took."""
    status = run_command(armed(config, point, seconds), out)
    if status == 0 and point.stage == "any":
        return 1  # it was faster this time
    if status != -signal.SIGKILL:
        raise SystemExit(f"the run was to be killed, but ended with {status}: {out}/output.txt")
    status = run_command(config, out)
    if status != 0:
        raise SystemExit(f"the resumed run ended with {status}: see {out}/output.txt")
    return 2
