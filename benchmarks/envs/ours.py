"""Run the library's PPO for `benchmarks/envs`, in processes of its own.

`Trainer.fit` of an `ActorCriticModule` without logger and bars. Its defaults are CartPole's task.
"""

import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.envs.task import (
    CLIP,
    ENVS,
    EPS,
    FRAMES,
    LAMBDA,
    MAX_GRAD_NORM,
    TASKS,
    VALUE_COEF,
    Progress,
    Task,
    arguments_of,
)
from benchmarks.support.task import quiet_trainer
from lightning_rl.algos.losses import PPOClip, ValueLoss
from lightning_rl.envs.algos.steps import StepGAE
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.envs.gym import ACTION, OBSERVATION, Gym
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.module import ActorCriticModule


class Clock(Callback):
    """Reports to ``Progress``, and stops with it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.begin()

    def on_train_batch_end(self, trainer: Trainer, *arguments: object) -> None:
        trainer.should_stop = self.progress.iterated()


def make_module(task: Task, seed: int, **options: Any) -> ActorCriticModule:
    """Make the module; ``options`` are its arguments."""
    return ActorCriticModule(
        loss=PPOClip(CLIP, CLIP),
        advantage=StepGAE(task.gamma, lam=LAMBDA),
        value_loss=ValueLoss(2 * VALUE_COEF),
        optimizer=lambda p: torch.optim.Adam(p, lr=task.lr, eps=EPS, fused=True),
        epochs=task.epochs,
        minibatches=task.minibatches,
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
        **options,
    )


def made_of(task: Task) -> Gym:
    """Make the task's environment, as all sides have it."""
    told = {"class_path": "benchmarks.envs.task.Told", "init_args": {"scale": task.scale}}
    return Gym(task.environment, wrappers=[told])


def make_data(task: Task, iterations: int, seed: int) -> EnvDataModule:
    """Make the data of one epoch of so many iterations."""
    return EnvDataModule(
        made_of(task),
        num_envs=ENVS,
        frames_per_iteration=FRAMES,
        iterations_per_epoch=iterations,
        seed=seed,
    )


def fit(module: ActorCriticModule, data: EnvDataModule, callback: Callback) -> None:
    with tempfile.TemporaryDirectory() as directory:
        quiet_trainer(directory, [callback]).fit(module, datamodule=data)


def main(**options: Any) -> None:
    """Run once; ``options`` are the module's."""
    arguments = arguments_of(__doc__)
    task = TASKS[arguments.task]
    seed_everything(arguments.seed, verbose=False)
    module = make_module(task, arguments.seed, **options)

    def policy(observations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        agent: Any = module.agents[AGENT]
        made = agent.act({OBSERVATION: observations})[0][ACTION]
        return (made.logits,) if hasattr(made, "logits") else (made.mean, made.log_std)

    progress = Progress(task, policy, arguments.most)
    fit(module, make_data(task, progress.most, arguments.seed), Clock(progress))
    progress.report(arguments.out, "lightning")


if __name__ == "__main__":
    main()
