"""Run TRL's GRPOTrainer on one task for `benchmarks/peers`, in that benchmark's environment.

Needs torch and trl, nothing of this project. `--generation`: padded, continuous, or vllm, which
`benchmarks/peers/trl_vllm.py` makes possible. Under torchrun accelerate makes one run of its
processes, of the same 256 completions an iteration.

TRL at its best on a CPU in float32: no gradient checkpointing (its default; a fifth slower), no KL,
no second forward pass for old logprobs (TRL skips it with one update per batch), fused AdamW, no
logging, no search for unused parameters on two processes. Loss `dapo`, TRL's default, is the mean
over tokens that ours is as well.
"""

import os
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.peers.run import Progress, parser_of_run

BEST: dict[str, Any] = {
    "temperature": 1.0,
    "beta": 0.0,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": False,
    "logging_steps": 10**9,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""TRL's settings on a CPU, whatever the task."""


class Clock(TrainerCallback):
    """Reports to ``Progress``; stops at the goal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress.finished():
            control.should_training_stop = True


def main() -> None:
    arguments = parser_of_run("One run of TRL's GRPOTrainer.").parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    progress = Progress(arguments.goal)
    of_each_process = 256 // int(os.environ.get("WORLD_SIZE", "1"))
    micro_batch = min(arguments.micro_batch, of_each_process)

    def exact_match(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
    ) -> list[float]:
        """Score as recipes/sort_digits/reward.py does: right, and ended by itself."""
        rows = list(zip(completions, completion_ids, answer, strict=True))
        rewards = [float(c == a and ids[-1] == tokenizer.eos_token_id) for c, ids, a in rows]
        progress.collected(rewards, sum(len(ids) for _, ids, _ in rows))
        return rewards

    config = GRPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.iterations,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=of_each_process // micro_batch,
        num_generations=8,
        max_completion_length=arguments.max_tokens,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        ddp_find_unused_parameters=False,
        seed=arguments.seed,
        use_transformers_continuous_batching=arguments.generation == "continuous",
        # It takes half of the machine's memory for its cache by itself; this much is enough.
        transformers_continuous_batching_config={
            "page_size": 32,
            "num_blocks": max(512, 256 * arguments.max_model_len // 32),
            "max_batch_tokens": 4096,
        },
        use_vllm=arguments.generation == "vllm",
        vllm_max_model_length=arguments.max_model_len,
        **BEST,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=exact_match,
        args=config,
        train_dataset=load_dataset("json", data_files=arguments.prompts, split="train"),
        processing_class=tokenizer,
        callbacks=[Clock(progress)],
    )
    trainer.train()
    progress.report(arguments.out)


if __name__ == "__main__":
    main()
