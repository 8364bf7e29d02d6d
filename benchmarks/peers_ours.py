"""The library on one task, for `benchmarks/peers.py`, which runs it in a process of its own.

Through `Trainer.fit`, with the weight sync and its probe, the preview of rollouts, the step timer
and a TensorBoard logger. The last line is JSON: CPU seconds of every iteration, and mean rewards.
"""

import argparse
import json
import resource
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rl import (
    GRPO,
    JSONLPrompts,
    PolicyModule,
    PreviewTable,
    RLCallback,
    RLDataModule,
    Rollout,
    Sampling,
    StepTimer,
    VLLMLocal,
    WeightSync,
)
from recipes.sort_digits.reward import exact_match


class Clock(RLCallback):
    """CPU seconds per iteration; stops when the mean reward of the last three reaches the goal."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.begin = self.since = 0.0

    # Before WeightSync's, so the first sync counts in the first iteration.
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin = self.since = time.process_time()

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.rewards.append(sum(r.reward or 0.0 for r in rollouts) / len(rollouts))
        self.tokens.append(sum(len(r.token_ids) for r in rollouts))

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        if not self.rewards:  # the row of the first sync, before any iteration
            return
        now = time.process_time()
        self.seconds.append(now - self.since)
        self.since = now
        if len(self.rewards) >= 3 and sum(self.rewards[-3:]) / 3 >= self.goal:
            trainer.should_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description="One run of the library.")
    for name in ("--model", "--prompts", "--out"):
        parser.add_argument(name, required=True)
    for name in ("--iterations", "--seed", "--threads", "--max-model-len"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--goal", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seed_everything(arguments.seed, verbose=False)

    clock = Clock(arguments.goal)
    module = PolicyModule(
        arguments.model,
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0, fused=True),
    )
    data = RLDataModule(
        JSONLPrompts(arguments.prompts),
        [exact_match],
        VLLMLocal(
            max_model_len=arguments.max_model_len,
            options={"max_num_batched_tokens": 8192},
        ),
        sampling=Sampling(max_tokens=10, temperature=1.0),
        group_size=8,
        groups_per_iteration=32,
        iterations_per_epoch=arguments.iterations,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=TensorBoardLogger(arguments.out),
        callbacks=[clock, WeightSync(), PreviewTable(), StepTimer()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    print(
        json.dumps(
            {
                "cpu_s": clock.seconds,
                "rewards": clock.rewards,
                "tokens": clock.tokens,
                "setup_cpu_s": clock.begin,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
