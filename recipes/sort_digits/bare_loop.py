"""Train the same without `Trainer.fit`: every step of an iteration is called by its name.

    python -m recipes.sort_digits.bare_loop --iterations 20
    python -m recipes.sort_digits.bare_loop --iterations 20 --devices 2

Use it when you want to own the loop: your code can stand between any two steps. Lightning Fabric
gives the module its device, precision and optimizer, and starts the other processes; a script for
one process needs none of it, and `loop.fit(rollouts)` does all steps from the rollouts on.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric

from lightning_rl import (
    GRPO,
    JSONLPrompts,
    PolicyModule,
    Rewards,
    Sampling,
    SingleTurn,
    UpdateSettings,
    VLLMLocal,
)
from lightning_rl.extend import FabricDDP, GroupSource, OwnLoop, RolloutPipeline, pack_rollouts
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.run.processes.dist import all_reduce_max, every_rank, global_mean_std
from recipes.sort_digits.reward import exact_match


def train(model: str, prompts_path: str, iterations: int, devices: int = 1) -> list[float]:
    """Train for ``iterations`` on ``devices`` processes; returns the mean reward of each."""
    fabric = Fabric(
        accelerator="auto", devices=devices, strategy=FabricDDP() if devices > 1 else "auto"
    )
    fabric.launch()  # from here on every process runs this, with its own rank
    fabric.seed_everything(0)
    module = PolicyModule(
        model,
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-4, weight_decay=0.0),
        update=UpdateSettings(minibatches=2),
    )
    loop = OwnLoop(module, fabric)
    learner, tokenizer = loop.learner, module.tokenizer

    prompts = JSONLPrompts(prompts_path)
    prompts.load(tokenizer)
    probe = prompts.first(4)
    engine = VLLMLocal(max_model_len=32)
    with tempfile.TemporaryDirectory() as directory:
        save_skeleton(model, directory)
        engine.start(Path(directory))
    sampling = Sampling(max_tokens=10, temperature=1.0)
    pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([exact_match]), tokenizer)
    # All ranks draw the same prompts and take turns with them, 32 in an iteration.
    rank, ranks = fabric.global_rank, fabric.world_size
    source = GroupSource(prompts, 32 // ranks, 8, sampling, rank=rank, ranks=ranks)

    mean_rewards = []
    for iteration in range(iterations):
        gap = loop.sync_weights(engine, probe=probe, temperature=sampling.temperature)

        source.begin(iteration)
        groups = [source.next() for _ in range(source.num_groups)]
        with every_rank():  # what fails on one rank ends all, instead of letting them wait
            pipeline.complete(groups, sampling)
            batch = fabric.to_device(pack_rollouts([r for group in groups for r in group]))
        batch = learner.compute_old_logprobs(batch)
        batch = learner.compute_advantages(batch)
        metrics = learner.update(batch)
        learner.end_iteration(metrics)

        rewards, _ = global_mean_std(batch["rollouts", "reward"])
        mean_rewards.append(float(rewards))
        fabric.print(
            f"iteration {iteration + 1}: reward {mean_rewards[-1]:.3f}, entropy "
            f"{metrics.get('policy/entropy', 0.0):.3f}, engine-trainer gap "
            f"{all_reduce_max(gap):.1e}",
            flush=True,
        )
    engine.close()
    return mean_rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sort-digits, step by named step.")
    parser.add_argument("--model", default="runs/sort_digits/sft/hf")
    parser.add_argument("--prompts", default="runs/sort_digits/train.jsonl")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.model, arguments.prompts, arguments.iterations, arguments.devices)


if __name__ == "__main__":
    main()
