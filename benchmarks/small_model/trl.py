"""Run TRL's GRPOTrainer on the tasks of recipes/smollm2, for `benchmarks.small_model`.

The settings of the recipe, and TRL at its best on a CPU (benchmarks/peers/trl.py says what that
is), with vLLM in its process. Each iteration has two questions of each task.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.run import Progress
from benchmarks.peers.trl_vllm import mend
from benchmarks.small_model.runs import GROUP_SIZE, GROUPS, MAX_TOKENS, TRAINED
from recipes.smollm2.tasks import last_number

NEVER = 2.0
MICRO_BATCH = 16


def questions(directory: Path, number: int) -> Dataset:
    """Return questions of all tasks in turn."""
    rng = random.Random(0)
    files = [(directory / "train" / f"{task}.jsonl").read_text().splitlines() for task in TRAINED]
    shuffled = [rng.sample(lines, len(lines)) for lines in files]
    drawn = [
        lines[i // len(files) % len(lines)]
        for i in range(number)
        for lines in [shuffled[i % len(files)]]
    ]
    return Dataset.from_list([json.loads(line) for line in drawn])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    given = parser.parse_args()
    mend()
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    from benchmarks.peers.trl import BEST, Clock

    progress = Progress(NEVER)

    def graded(
        completions: list[Any], completion_ids: list[list[int]], answer: list[int], **_: Any
    ) -> list[float]:
        rewards = last_number(completions, answer)
        progress.collected(rewards, sum(map(len, completion_ids)))
        return rewards

    config = GRPOConfig(
        output_dir=str(given.out),
        max_steps=given.iterations,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // MICRO_BATCH,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        learning_rate=given.lr,
        max_grad_norm=0.0,
        seed=0,
        shuffle_dataset=False,
        use_vllm=True,
        vllm_max_model_length=128,
        **BEST,
    )
    model = given.data / "model"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=graded,
        args=config,
        train_dataset=questions(given.data, given.iterations * GROUPS),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock(progress)],
    )
    trainer.train()
    trainer.save_model(str(given.out / "hf"))
    progress.report(str(given.out))


if __name__ == "__main__":
    main()
