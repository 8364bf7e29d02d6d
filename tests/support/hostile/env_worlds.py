"""Rude-v0, which does what environments should not, and the runs of hostile calls that meet it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.callbacks import IterationCheckpoint
from lightning_rl.envs import (
    ActorCriticModule,
    EnvDataModule,
    Gym,
    PooledGym,
    TorchRLEnv,
)

NAME = f"{__name__}:Rude-v0"
HUNG = Path("hung")
"""There once an environment hangs."""


def _hangs() -> None:
    HUNG.touch()
    time.sleep(600)


def _exits() -> None:
    raise SystemExit(0)


def _raises() -> None:
    raise ValueError("the simulator is gone")


def _quits() -> None:
    os._exit(0)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crashes() -> None:
    ctypes.string_at(0)


DEEDS: dict[str, Callable[[], None]] = {
    "hangs": _hangs, "exits": _exits, "raises": _raises, "quits": _quits, "dies": _dies,
    "crashes": _crashes,
}  # fmt: skip
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "not over": lambda answer: (*answer[:2], None, *answer[3:]),
    "nothing": lambda answer: None,
    "old": lambda answer: answer[0] if len(answer) == 2 else answer[:4],
    "long": lambda answer: (np.zeros(3, np.float32), *answer[1:]),
    "short": lambda answer: (np.zeros(1, np.float32), *answer[1:]),
    "text": lambda answer: ("here", *answer[1:]),
    "nan": lambda answer: (np.array([np.nan, 0], np.float32), *answer[1:]),
    "unpaid": lambda answer: (answer[0], None, *answer[2:]),
    "paid nan": lambda answer: (answer[0], float("nan"), *answer[2:]),
}
SAYS = {"no space": None, "text for a space": "left or right"}


class Rude(gymnasium.Env[Any, Any]):
    """A line to walk on; see ``DEEDS`` and ``ANSWERS`` for ``how``.

    Args:
        how: what it does.
        where: ``init``, ``reset``, ``step`` or ``close``.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, how: str = "", where: str = "step") -> None:
        self.how, self.where, self.steps, self.place = how, where, 0, 0.0
        if how in SAYS:
            self.action_space = SAYS[how]
        self._do("init")

    def _do(self, where: str, answer: Any = None) -> Any:
        due = where == self.where and (where != "step" or self.steps == 3)
        if due and self.how in ANSWERS:
            return ANSWERS[self.how](answer)
        if due and self.how in DEEDS:
            DEEDS[self.how]()
        return answer

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.place = 0, 0.0
        return self._do("reset", (np.zeros(2, np.float32), {}))

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place += 1.0 if action == 1 else -1.0
        seen = np.array([self.place, self.steps], np.float32)
        return self._do("step", (seen, 1.0, False, self.steps >= 8, {}))

    def close(self) -> None:
        self._do("close")


gymnasium.register("Rude-v0", f"{__name__}:Rude")


def torchrl(how: str, where: str, **options: Any) -> TorchRLEnv:
    """Return the same environment, as torchrl has gymnasium's."""
    arguments = {"env_name": NAME, "how": how, "where": where, "categorical_action_encoding": True}
    return TorchRLEnv("torchrl.envs.GymEnv", arguments | {"device": "cpu"}, **options)


KINDS: dict[str, Callable[[str, str], Any]] = {
    "Gym": lambda how, where: Gym(NAME, {"how": how, "where": where}),
    "PooledGym": lambda how, where: PooledGym(NAME, {"how": how, "where": where}),
    "TorchRLEnv": torchrl,
    "TorchRLEnv in processes": lambda how, where: torchrl(how, where, parallel=True),
}


class Terminate(Callback):
    """Sends this process a signal once an environment hangs."""

    def __init__(self, number: int) -> None:
        self.number = number

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while not HUNG.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), self.number)


def fit(
    folder: Path,
    env: Any,
    *callbacks: Callback,
    module: LightningModule | None = None,
    **data: Any,
) -> None:
    """Run shortly, as a script does."""
    given = {"num_envs": 2, "frames_per_iteration": 16, "iterations_per_epoch": 1} | data
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[IterationCheckpoint(), *callbacks],
    )
    trainer.fit(module or ActorCriticModule(), datamodule=EnvDataModule(env, **given))


def script(text: str) -> Callable[[Path], object]:
    """Return a call that is a script in the folder."""

    def play(folder: Path) -> None:
        (folder / "script.py").write_text(text)
        status = subprocess.run([sys.executable, "script.py"], check=False).returncode
        if status:
            sys.exit(status)

    return play
