"""The library's PPO on CartPole, for `benchmarks/envs.py`, which runs it in processes of its own.

`Trainer.fit` of an `ActorCriticModule`, whose defaults are the task, without logger and bars.
"""

import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.envs_task import (
    CLIP,
    ENVIRONMENT,
    ENVS,
    EPOCHS,
    EPS,
    FRAMES,
    GAMMA,
    LAMBDA,
    LR,
    MAX_GRAD_NORM,
    MINIBATCHES,
    VALUE_COEF,
    Progress,
    arguments_of,
)
from benchmarks.task import quiet_trainer
from lightning_rl.algos.losses import PPOClip, ValueLoss
from lightning_rl.algos.steps import StepGAE
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.envs.gym import ACTION, OBSERVATION, Gym
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.module import ActorCriticModule


class Clock(Callback):
    """Reports to ``Progress``."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.begin()

    def on_train_batch_end(self, *arguments: object) -> None:
        self.progress.iterated()


def make_module(seed: int) -> ActorCriticModule:
    return ActorCriticModule(
        loss=PPOClip(CLIP, CLIP),
        advantage=StepGAE(GAMMA, lam=LAMBDA),
        value_loss=ValueLoss(2 * VALUE_COEF),
        optimizer=lambda p: torch.optim.Adam(p, lr=LR, eps=EPS, fused=True),
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
    )


def make_data(iterations: int, seed: int) -> EnvDataModule:
    """One epoch of so many iterations."""
    return EnvDataModule(
        Gym(ENVIRONMENT),
        num_envs=ENVS,
        frames_per_iteration=FRAMES,
        iterations_per_epoch=iterations,
        seed=seed,
    )


def fit(module: ActorCriticModule, data: EnvDataModule, callback: Callback) -> None:
    with tempfile.TemporaryDirectory() as directory:
        quiet_trainer(directory, [callback]).fit(module, datamodule=data)


def main() -> None:
    arguments = arguments_of(__doc__)
    seed_everything(arguments.seed, verbose=False)
    progress = Progress()
    module = make_module(arguments.seed)
    fit(module, make_data(arguments.iterations, arguments.seed), Clock(progress))
    agent: Any = module.agents[AGENT]

    def logits(observations: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = agent.act({OBSERVATION: observations})[0][ACTION].logits
        return made

    progress.report(arguments.out, logits, "lightning")


if __name__ == "__main__":
    main()
