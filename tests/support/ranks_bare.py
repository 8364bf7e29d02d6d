"""Run a loop of one's own with Lightning Fabric."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_rl.agents.base import SingleTurn
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.learn.own_loop import FabricDDP, OwnLoop
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from tests.support.lots import LotEngine
from tests.support.ranks_run import prompts, share_of_even_digits


def bare_loop(model: str, devices: int = 1) -> dict[str, Any]:
    """Run the named steps in a loop of one's own, as in recipes/sort_digits/bare_loop.py."""
    strategy = "auto" if devices == 1 else FabricDDP()
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    module = PolicyModule(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        # The norm's bound is less than there is: gradients must be averaged before.
        update={"max_grad_norm": 0.5, "max_tokens_per_micro_batch": 24, "ppo_epochs": 2, "seed": 7},
    )
    learner = OwnLoop(module, fabric).learner
    policy = learner.policy
    source_of_prompts = prompts()
    source_of_prompts.load(policy.tokenizer)
    engine, sampling = LotEngine(device="cpu"), Sampling(max_tokens=6)
    with tempfile.TemporaryDirectory() as directory:
        save_skeleton(model, directory)
        engine.start(Path(directory))
    rewards = Rewards([share_of_even_digits])
    pipeline = RolloutPipeline(engine, SingleTurn(), rewards, policy.tokenizer)
    source = GroupSource(
        source_of_prompts, 4 // fabric.world_size, 3, sampling, seed=5,
        rank=fabric.global_rank, ranks=fabric.world_size,
    )  # fmt: skip
    told, ids = [], []
    for iteration in range(3):
        engine.load_weights(policy.named_weights(), version=iteration)
        source.begin(iteration)
        groups = [source.next() for _ in range(source.num_groups)]
        pipeline.complete(groups, sampling)
        rollouts = [rollout for group in groups for rollout in group]
        ids.append([(r.id, r.token_ids) for r in rollouts])
        batch = learner.compute_old_logprobs(pack_rollouts(rollouts))
        told.append(learner.update(learner.compute_advantages(batch)))
        learner.end_iteration(told[-1])
    return {
        "rows": told,
        "rollouts": ids,
        "weights": [float(p.norm()) for p in policy.parameters()],
    }
