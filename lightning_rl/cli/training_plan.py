"""What ``lightning-rl check`` says of training: each policy's batches, and the memory of all."""

from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.nn import Parameter

from lightning_rl.callbacks import WeightSync
from lightning_rl.cli.plan import (
    BatchPlan,
    MemoryPlan,
    Placement,
    cut,
    in_units,
    largest_rollouts,
    largest_share,
    together,
    training_memory,
)
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Engine, TransformersEngine
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.update_schedules import EveryIteration
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.quantized_layers import weights_in
from lightning_rl.module import PolicyModule, policies_of
from lightning_rl.rollout import Prompt
from lightning_rl.run.hooks import find_callbacks


def training_plan(
    module: RolloutModule, data: RLDataModule, prompts: Sequence[Prompt], device: torch.device
) -> tuple[list[str], MemoryPlan]:
    """Lines for a person, and the memory of training on the device.

    What a policy has in memory that one before it has too, such as a common base, counts once.
    """
    trainer, learning = module.trainer, _Learning(module, data, prompts, device)
    lines, plans = list[str](), dict[str, MemoryPlan]()
    seen: set[Parameter] = set()
    for name, policy in policies_of(module).items():
        roles = [role for role, player in module.roles.items() if player == name]
        told, plans[name] = learning.plan(policy, max(1, len(roles)), seen)
        if roles:
            lines.append(_described(name, roles, policy, seen))
        lines += [f"batches{f' of {name}' if name else ''}:", *(f"  {line}" for line in told)]
        seen.update(policy.loaded_policy.parameters())
    if len(plans) > 1:
        lines.append("memory of each policy, beside what those before it have (an estimate):")
        lines += [f"  {name:<30}{in_units(plan.total):>11}" for name, plan in plans.items()]
    memory, elements = together(list(plans.values())), largest_model(module)
    return [
        *lines,
        "memory of training, per process (an estimate):",
        *(f"  {line}" for line in memory.lines()),
        f"memory of the engine: {_engine(data.engine, elements)}",
        *(
            f"memory of the host for weight pushes: {in_units(kept)} on rank 0 (keep_copy), from "
            "which restarted engines are filled"
            for sync in find_callbacks(trainer, WeightSync)
            if (kept := sync.transport.kept_bytes(data.engine, elements))
        ),
    ], memory


def largest_model(module: RolloutModule) -> int:
    """Weights of the largest model that an engine has to hold."""
    policies = (policy.loaded_policy.lm for policy in module.policies.values())
    return max(sum(weights_in(lm).values()) for lm in policies)


def _described(
    name: str, roles: Sequence[str], policy: PolicyModule, seen: AbstractSet[Parameter]
) -> str:
    """Who plays what, and what of its weights are trained."""
    own = weights_in(policy.loaded_policy)
    trained = sum(count for p, count in own.items() if p.requires_grad)
    new = sum(count for p, count in own.items() if p not in seen)
    return (
        f"policy {name} (plays {', '.join(roles)}): {sum(own.values()):,} parameters, "
        f"{trained:,} of them trained, {new:,} that no policy before it has in memory"
    )


@dataclass(frozen=True)
class _Learning:
    """What policies learn from, and where."""

    module: RolloutModule
    data: RLDataModule
    prompts: Sequence[Prompt]
    device: torch.device

    def plan(
        self, policy: PolicyModule, rows: int, seen: AbstractSet[Parameter]
    ) -> tuple[list[str], MemoryPlan]:
        """Of a policy that writes so many rows in a rollout: each a prompt and its completion."""
        data, trainer = self.data, self.module.trainer
        ranks = trainer.world_size
        groups = data.groups_per_iteration // ranks
        # Of several prompt sets the largest of each may come together.
        tokens = max(task.sampling.max_tokens for task in data.train_tasks)
        group_size = max(task.group_size for task in data.train_tasks)
        written = group_size * rows
        batch = pack_rollouts(largest_rollouts(self.prompts, groups, written, tokens))
        placement = self._placement()
        budget = policy.max_tokens_per_pack * placement.sequence
        parts = cut(batch, policy.minibatches, budget)
        if ranks > 1:
            # Each minibatch is dealt of all ranks' groups, and may take most from this one.
            share = largest_share(data.groups_per_iteration, ranks, policy.minibatches)
            most = pack_rollouts(largest_rollouts(self.prompts, share, written, tokens))
            parts = cut(most, 1, budget)
        largest = max((pack for packs in parts for pack in packs), key=forward_tokens)
        epochs = trainer.max_epochs
        plan = BatchPlan(
            prompts=len(self.prompts),
            groups=data.groups_per_iteration,
            group_size=group_size,
            ranks=ranks,
            tokens=len(batch["tokens"]) * ranks,
            minibatches=policy.minibatches,
            ppo_epochs=policy.ppo_epochs,
            packs=max(len(packs) for packs in parts),
            pack_tokens=forward_tokens(largest),
            iterations_per_epoch=data.iterations_per_epoch,
            epochs=epochs if epochs is not None and epochs > 0 else None,
            schedule=getattr(policy, "schedule", EveryIteration()),
        )
        # With one parameter of its own: a step of it tells what the state of all will take.
        optimizer = policy.optimizer([Parameter(torch.zeros(1024))])
        others = [] if policy.reference is None else [policy.reference]
        memory = training_memory(policy.loaded_policy, others, optimizer, largest, placement, seen)
        return [*plan.lines(), *_schedule(policy, optimizer, plan)], memory

    def _placement(self) -> Placement:
        trainer = self.module.trainer
        strategy = trainer.strategy
        tensor = tensor_size(strategy)
        shards = trainer.world_size if isinstance(strategy, ModelParallelStrategy) else 1
        return Placement(
            self.device,
            str(trainer.precision),
            getattr(trainer.precision_plugin, "master_weights", True),
            shards // tensor,
            getattr(strategy, "cpu_offload", False),
            getattr(strategy, "sequence", 1),
            tensor,
        )


def tensor_size(strategy: Strategy) -> int:
    """How many processes have a model's matrices together under a strategy."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    size = strategy._tensor_parallel_size
    return strategy.num_processes if size == "auto" else size


def _schedule(
    policy: PolicyModule, optimizer: torch.optim.Optimizer, plan: BatchPlan
) -> Iterator[str]:
    """A schedule that ends at another step than the run is hardly meant."""
    if policy.lr_scheduler is None:
        return
    ends = getattr(policy.lr_scheduler(optimizer), "total_steps", None)
    if ends is None or plan.total_steps is None or ends == plan.total_steps:
        return
    yield (
        f"WARNING: the learning rate's schedule ends after total_steps={ends} optimizer steps, "
        f"the run after {plan.total_steps}; set model.lr_scheduler.total_steps"
    )


def _engine(engine: Engine, elements: int) -> str:
    cache = f"{engine.kv_cache_gb:g} GiB" if engine.kv_cache_gb else "the engine's own choice"
    if isinstance(engine, TransformersEngine):
        cache = "as it grows"
    rounded = "" if engine.precision == engine.dtype else f", then rounded to {engine.precision}"
    weights = f"{in_units(engine.weight_bytes(elements))} of weights in {engine.dtype}{rounded}"
    return f"{weights}, key/value cache: {cache}"
