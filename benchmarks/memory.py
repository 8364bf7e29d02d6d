"""Compare the memory that `lightning-rl check` estimates with what an update takes.

    python -m benchmarks.memory recipes/sort_digits/grpo.yaml

Trains one iteration on the largest batch that the configuration allows, on the CPU, and follows
every allocation of torch. The last line is JSON.
"""

import argparse
import json
from pathlib import Path

from benchmarks.support.allocations import FollowAllocations
from benchmarks.support.built import Built
from benchmarks.support.task import quiet_trainer
from lightning_rl.cli.check.batches import cut, largest_rollouts
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.models.memory import forward_tokens
from lightning_rl.module import PolicyModule


def main(config: str, *options: str) -> None:
    """Measure one update and print it beside the estimate."""
    cli = Built(["fit", "--config", config, *options])
    module, data = cli.model, cli.datamodule
    assert isinstance(module, PolicyModule)
    assert isinstance(data, RLDataModule)
    follow = FollowAllocations()
    trainer = quiet_trainer(Path.cwd(), [follow], precision=cli.trainer.precision)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.load_prompts("fit")
    module.configure_model()
    assert module.policy is not None
    rollouts = largest_rollouts(
        data.train_prompts.first(),
        data.groups_per_iteration,
        data.group_size,
        data.sampling.max_tokens,
        data.sampling.distribution,
    )
    for rollout in rollouts:  # else the update would leave them out
        rollout.reward = float(rollout.sample_index % 2)
    update = module.update
    micro_batches = cut(pack_rollouts(rollouts), update.minibatches, update.tokens_per_micro_batch)
    largest = max(
        (micro_batch for parts in micro_batches for micro_batch in parts), key=forward_tokens
    )
    others = [] if module.reference is None else [module.reference]
    placement = Placement(precision=str(cli.trainer.precision))
    estimate = training_memory(
        module.policy,
        others,
        module.optimizer,
        largest,
        placement,
        bonus=module.objective.entropy is not None,
        passes=max(map(len, micro_batches)),
    )
    print("\n".join(estimate.lines()))
    trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts), 1))
    before = ("weights", "other models", "master weights")  # made before the batch began
    measured = follow.peak + sum(estimate.parts.get(name, 0) for name in before)
    estimated = estimate.total + sum(estimate.host.values())  # on the CPU it is all one memory
    print(
        json.dumps(
            {
                "config": config,
                "micro_batch_tokens": forward_tokens(largest),
                "estimated_mib": round(estimated / 2**20, 1),
                "measured_mib": round(measured / 2**20, 1),
                "ratio": round(estimated / measured, 3),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="a configuration; what follows goes to lightning-rl fit")
    arguments, others = parser.parse_known_args()
    main(arguments.config, *others)
