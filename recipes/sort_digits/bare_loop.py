"""The same training without `Trainer.fit`: every step of an iteration, called by its name.

    python -m recipes.sort_digits.bare_loop --iterations 20

For when you want to own the loop: your code can stand between any two steps. Lightning Fabric gives
the module its device, precision and optimizer.
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
    RolloutPipeline,
    Sampling,
    SingleTurn,
    VLLMLocal,
    pack_rollouts,
)
from lightning_rl.models.policy import save_skeleton
from lightning_rl.sync.verify import probe_gap
from recipes.sort_digits.reward import exact_match


def train(model: str, prompts_path: str, iterations: int) -> list[float]:
    """Train for ``iterations``; returns the mean reward of each."""
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.seed_everything(0)
    module = PolicyModule(
        model,
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-4, weight_decay=0.0),
        minibatches=2,
    )
    module.configure_model()
    assert module.policy is not None
    policy, tokenizer = module.policy, module.policy.tokenizer
    fabric.setup(module, module.configure_optimizers())

    prompts = JSONLPrompts(prompts_path)
    prompts.load(tokenizer)
    engine = VLLMLocal(max_model_len=32)
    with tempfile.TemporaryDirectory() as directory:
        save_skeleton(model, directory)
        engine.start(Path(directory))
    sampling = Sampling(max_tokens=10, temperature=1.0)
    pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([exact_match]), tokenizer)

    mean_rewards = []
    for iteration in range(iterations):
        engine.load_weights(policy.named_weights(), version=iteration)
        drawn = prompts.draw(32)
        gap = probe_gap(engine, policy, drawn[:4], sampling.temperature).value

        rollouts = pipeline.run(drawn, 8, sampling, iteration=iteration)
        batch = fabric.to_device(pack_rollouts(rollouts))
        batch = module.compute_old_logprobs(batch)
        batch = module.compute_advantages(batch)
        metrics = module.update(batch)
        module.iteration += 1

        mean_rewards.append(float(batch["rollouts", "reward"].mean()))
        print(
            f"iteration {iteration + 1}: reward {mean_rewards[-1]:.3f}, entropy "
            f"{metrics.get('policy/entropy', 0.0):.3f}, engine-trainer gap {gap:.1e}",
            flush=True,
        )
    engine.close()
    return mean_rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sort-digits, step by named step.")
    parser.add_argument("--model", default="runs/sort_digits/sft/hf")
    parser.add_argument("--prompts", default="runs/sort_digits/train.jsonl")
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    train(arguments.model, arguments.prompts, arguments.iterations)


if __name__ == "__main__":
    main()
