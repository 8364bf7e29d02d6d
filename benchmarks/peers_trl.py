"""TRL's GRPOTrainer on one task, for `benchmarks/peers.py`, in that benchmark's own environment.

Needs torch and trl, nothing of this project. The last line is JSON: CPU seconds of every iteration,
and mean rewards.

TRL at its best on a CPU in float32: no gradient checkpointing (its default; a fifth slower), no KL,
no second forward pass for old logprobs (TRL skips it with one update per batch), fused AdamW, no
logging. Loss `dapo`, TRL's default, is the mean over tokens that ours is as well.
"""

import argparse
import json
import resource
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class Clock(TrainerCallback):
    """CPU seconds per iteration; stops when the mean reward of the last three reaches the goal."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.begin = self.since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin = self.since = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self.since)
        self.since = now
        if len(self.rewards) >= 3 and sum(self.rewards[-3:]) / 3 >= self.goal:
            control.should_training_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description="One run of TRL's GRPOTrainer.")
    for name in ("--model", "--prompts", "--out", "--generation"):
        parser.add_argument(name, required=True)
    for name in ("--iterations", "--seed", "--threads", "--micro-batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--goal", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    clock = Clock(arguments.goal)

    def exact_match(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
    ) -> list[float]:
        """As recipes/sort_digits/reward.py: right, and ended by itself."""
        rows = list(zip(completions, completion_ids, answer, strict=True))
        rewards = [float(c == a and ids[-1] == tokenizer.eos_token_id) for c, ids, a in rows]
        clock.rewards.append(sum(rewards) / len(rewards))
        clock.tokens.append(sum(len(ids) for _, ids, _ in rows))
        return rewards

    config = GRPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.iterations,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=256 // arguments.micro_batch,
        num_generations=8,
        max_completion_length=10,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=arguments.seed,
        use_transformers_continuous_batching=arguments.generation == "continuous",
        # By itself it takes half of the machine's memory for its cache; this much is enough.
        transformers_continuous_batching_config={
            "page_size": 32,
            "num_blocks": 512,
            "max_batch_tokens": 4096,
        },
        logging_steps=10**9,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=exact_match,
        args=config,
        train_dataset=load_dataset("json", data_files=arguments.prompts, split="train"),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
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
