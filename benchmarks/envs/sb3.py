"""Run Stable-Baselines3's PPO for `benchmarks/envs`, in that benchmark's environment.

At its best: environments in this process and without its Monitor, no logs, fused Adam (its own
default is not fused). Its value loss is the mean squared error, so the coefficient is half of what
others call 0.5. Actor and critic are clipped together.
"""

import torch
from stable_baselines3 import PPO  # type: ignore[import-not-found]
from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found]
from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found]
from torch import Tensor

from benchmarks.envs.task import (
    CLIP,
    ENVS,
    EPS,
    FRAMES,
    LAMBDA,
    MAX_GRAD_NORM,
    STEPS,
    TASKS,
    VALUE_COEF,
    Progress,
    arguments_of,
)


class Clock(BaseCallback):
    """Reports to ``Progress``; an iteration is over when the next one begins."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.begun = self.over = False

    def _on_rollout_start(self) -> None:
        if self.begun:
            self.over = self.progress.iterated()
        else:
            self.progress.begin()
        self.begun = True

    def _on_training_end(self) -> None:
        if not self.over:
            self.progress.iterated()

    def _on_step(self) -> bool:
        return not self.over


def main() -> None:
    arguments = arguments_of(__doc__)
    task = TASKS[arguments.task]
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([task.made] * ENVS),
        learning_rate=task.lr,
        n_steps=STEPS,
        batch_size=FRAMES // task.minibatches,
        n_epochs=task.epochs,
        gamma=task.gamma,
        gae_lambda=LAMBDA,
        clip_range=CLIP,
        ent_coef=0.0,
        vf_coef=VALUE_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"optimizer_kwargs": {"eps": EPS, "fused": True}},
        seed=arguments.seed,
        device="cpu",
    )
    torch.set_num_threads(1)

    def policy(observations: Tensor) -> tuple[Tensor, ...]:
        made = model.policy.get_distribution(observations).distribution
        return (made.logits,) if hasattr(made, "logits") else (made.loc, made.scale.log())

    progress = Progress(task, policy, arguments.most)
    model.learn(progress.most * FRAMES, callback=Clock(progress), log_interval=None)
    progress.report(arguments.out, "stable-baselines3")


if __name__ == "__main__":
    main()
