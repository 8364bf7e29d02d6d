"""Stable-Baselines3's PPO on CartPole, for `benchmarks/envs.py`, in that benchmark's environment.

At its best: environments in this process and without its Monitor, no logs, fused Adam (its own
default is not fused). Its value loss is the mean squared error, so the coefficient is half of what
others call 0.5. Actor and critic are clipped together.
"""

import torch
from stable_baselines3 import PPO  # type: ignore[import-not-found]
from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found]
from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found]
from torch import Tensor

from benchmarks.envs_task import (
    CLIP,
    ENVS,
    EPOCHS,
    EPS,
    FRAMES,
    GAMMA,
    LAMBDA,
    LR,
    MAX_GRAD_NORM,
    MINIBATCHES,
    STEPS,
    VALUE_COEF,
    Progress,
    arguments_of,
    made,
)


class Clock(BaseCallback):
    """Reports to ``Progress``; an iteration is over when the next one begins."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.begun = False

    def _on_rollout_start(self) -> None:
        if self.begun:
            self.progress.iterated()
        else:
            self.progress.begin()
        self.begun = True

    def _on_training_end(self) -> None:
        self.progress.iterated()

    def _on_step(self) -> bool:
        return True


def main() -> None:
    arguments = arguments_of(__doc__)
    progress = Progress()
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([made] * ENVS),
        learning_rate=LR,
        n_steps=STEPS,
        batch_size=FRAMES // MINIBATCHES,
        n_epochs=EPOCHS,
        gamma=GAMMA,
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
    model.learn(arguments.iterations * FRAMES, callback=Clock(progress), log_interval=None)

    def logits(observations: Tensor) -> Tensor:
        found: Tensor = model.policy.get_distribution(observations).distribution.logits
        return found

    progress.report(arguments.out, logits, "stable-baselines3")


if __name__ == "__main__":
    main()
