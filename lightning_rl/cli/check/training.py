"""The training part of ``lightning-rl check``: each policy's batches, and the memory of all."""

from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

import torch
from lightning.pytorch import Trainer
from tensordict import TensorDict
from torch.nn import Parameter

from lightning_rl.callbacks import WeightSync
from lightning_rl.cli.check.batches import (
    BatchPlan,
    cut,
    largest_rollouts,
    largest_share,
    widest,
)
from lightning_rl.cli.check.gpu_memory import CardPlan
from lightning_rl.cli.check.memory import MemoryPlan, in_units, together, training_memory
from lightning_rl.cli.check.placement import Placement, placement_of
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Engine, TransformersEngine
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.schedulers import throwaway_scheduler
from lightning_rl.learn.update_schedules import EveryIteration
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.quantized_layers import weights_in
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.calling import HoldsModel
from lightning_rl.rollout import Prompt
from lightning_rl.run.hooks import find_callbacks


def training_plan(
    module: RolloutModule, data: RLDataModule, prompts: Sequence[Prompt], device: torch.device
) -> tuple[list[str], MemoryPlan]:
    """Return lines of text, and the memory of training on the device.

    Memory that policies share, such as a common base, counts once.
    """
    trainer = module.trainer
    learning = Learning(module, data, prompts, trainer.world_size)
    return learning.told(placement_of(trainer, device))


@dataclass(frozen=True)
class Learning:
    """The data that policies learn from, on ``ranks`` processes."""

    module: RolloutModule
    data: RLDataModule
    prompts: Sequence[Prompt]
    ranks: int
    _batches: dict[tuple[int, int, int], TensorDict] = field(default_factory=dict)

    def told(self, placement: Placement) -> tuple[list[str], MemoryPlan]:
        """Return what :func:`training_plan` does, for each process of a placement."""
        module, data, trainer = self.module, self.data, self.module.trainer
        lines, plans = list[str](), dict[str, MemoryPlan]()
        seen: set[Parameter] = set()
        for name, policy in module.policies.items():
            roles = [role for role, player in module.roles.items() if player == name]
            told, plans[name] = self.plan(policy, max(1, len(roles)), seen, placement)
            if roles:
                lines.append(_described(name, roles, policy, seen))
            lines += [f"batches{f' of {name}' if name else ''}:", *(f"  {line}" for line in told)]
            seen.update(policy.loaded_policy.parameters())
        if len(plans) > 1:
            lines.append("memory of each policy, in addition to those before it (an estimate):")
            lines += [f"  {name:<30}{in_units(plan.total):>11}" for name, plan in plans.items()]
        memory = together(list(plans.values()), self._reward_models, placement.device)
        elements = largest_model(module)
        return [
            *lines,
            "memory of training, per process (an estimate):",
            *(f"  {line}" for line in memory.lines()),
            f"memory of the engine: {_engine(data.engine, elements)}",
            *(
                f"memory of the host for weight pushes: {in_units(kept)} on rank 0 (keep_copy), "
                "from which restarted engines get their weights"
                for sync in find_callbacks(trainer, WeightSync)
                if (kept := sync.transport.kept_bytes(data.engine, elements))
            ),
        ], memory

    def plan(
        self,
        policy: PolicyModule,
        rows: int,
        seen: AbstractSet[Parameter],
        placement: Placement,
    ) -> tuple[list[str], MemoryPlan]:
        """Return the plan of a policy that writes ``rows`` rows per rollout: each a prompt and
        completion.
        """
        data, ranks = self.data, self.ranks
        groups = data.groups_per_iteration // ranks
        # Of several prompt sets the largest of each may come together.
        tokens = max(task.sampling.max_tokens for task in data.train_tasks)
        group_size = max(task.group_size for task in data.train_tasks)
        written = group_size * rows
        batch = self._largest(groups, written, tokens)
        budget = policy.update.tokens_per_micro_batch * placement.sequence
        filling = policy.loaded_policy.filling
        if ranks == 1:
            parts = cut(batch, policy.update.minibatches, budget, filling)
        else:
            # Each minibatch is dealt of all ranks' groups, and may take most from this one.
            share = largest_share(data.groups_per_iteration, ranks, policy.update.minibatches)
            parts = cut(self._largest(share, written, tokens), 1, budget, filling)
        micro_batches = [micro_batch for micro_batches in parts for micro_batch in micro_batches]
        largest = max(micro_batches, key=lambda micro_batch: forward_tokens(micro_batch, filling))
        epochs = self.module.trainer.max_epochs
        plan = BatchPlan(
            prompts=len(self.prompts),
            groups=data.groups_per_iteration,
            group_size=group_size,
            ranks=ranks,
            tokens=len(batch["tokens"]) * ranks,
            minibatches=policy.update.minibatches,
            ppo_epochs=policy.update.ppo_epochs,
            micro_batches=max(len(micro_batches) for micro_batches in parts),
            micro_batch_tokens=forward_tokens(largest, filling),
            iterations_per_epoch=data.iterations_per_epoch,
            epochs=epochs if epochs is not None and epochs > 0 else None,
            schedule=getattr(policy, "schedule", EveryIteration()),
        )
        others = [] if policy.reference is None else [policy.reference]
        memory = training_memory(
            policy.loaded_policy,
            others,
            policy.optimizer,
            largest,
            placement,
            seen,
            policy.objective.entropy is not None,
            plan.micro_batches * placement.sequence * placement.tensor,
        )
        steps = plan.total_steps
        faults = [] if steps is None else [*schedule_faults(policy, steps)]
        warnings = [f"WARNING: model.lr_scheduler: {fault}" for fault in faults]
        return [*plan.lines(), *warnings, *_open(policy)], memory

    @cached_property
    def _reward_models(self) -> list[tuple[torch.device | None, int]]:
        """The device of each model that a reward holds (None: the one that trains), and its bytes.

        Configurations are read once, though each placement asks.
        """
        tasks = self.data.tasks
        rewards = {id(f): f for task in tasks for f in task.rewards.functions.values()}
        models = [f for f in list[object](rewards.values()) if isinstance(f, HoldsModel)]
        return [
            (None if model.device is None else torch.device(model.device), model.weight_bytes())
            for model in models
        ]

    def _largest(self, groups: int, group_size: int, tokens: int) -> TensorDict:
        key = groups, group_size, tokens
        if key not in self._batches:  # long ones take seconds, and are asked for by each placement
            sampling = widest([task.sampling.distribution for task in self.data.train_tasks])
            self._batches[key] = pack_rollouts(largest_rollouts(self.prompts, *key, sampling))
        return self._batches[key]


def largest_model(module: RolloutModule) -> int:
    """Return the number of weights of the largest model that an engine has to hold."""
    policies = (policy.loaded_policy.lm for policy in module.policies.values())
    return max(sum(weights_in(lm).values()) for lm in policies)


def _described(
    name: str, roles: Sequence[str], policy: PolicyModule, seen: AbstractSet[Parameter]
) -> str:
    """Describe which roles a policy plays, and how many of its weights are trained."""
    own = weights_in(policy.loaded_policy)
    trained = sum(count for p, count in own.items() if p.requires_grad)
    new = sum(count for p, count in own.items() if p not in seen)
    return (
        f"policy {name} (plays {', '.join(roles)}): {sum(own.values()):,} parameters, "
        f"{trained:,} of them trained, {new:,} not shared with a policy before it"
    )


def card_plan(
    module: RolloutModule, data: RLDataModule, memory: MemoryPlan, card_gb: float | None
) -> CardPlan | None:
    """Return the plan of rank 0's GPU, which holds the most; None without a GPU."""
    trainer, engine = module.trainer, data.engine
    device = planned_device(trainer, card_gb)
    if device.type != "cuda":
        return None
    card = int((card_gb or 0) * 2**30) or torch.cuda.get_device_properties(device).total_memory
    engine.configure_dtype(compute_dtype(trainer))
    used, at_start = engine.memory_here(largest_model(module), card)
    buckets = sum(sync.transport.gpu_bytes for sync in find_callbacks(trainer, WeightSync))
    return CardPlan(card, memory, used, at_start, buckets, sleeps=engine.sleep_level is not None)


def planned_device(trainer: Trainer, card_gb: float | None) -> torch.device:
    """Return the device that will compute: a GPU if its size is given, else the Trainer's."""
    return trainer.strategy.root_device if card_gb is None else torch.device("cuda")


def _open(policy: PolicyModule) -> Iterator[str]:
    """Yield notes on settings that only the run itself determines."""
    if policy.auto_micro_batches is not None:
        yield (
            "update.max_tokens_per_micro_batch auto is measured on a GPU before the first update, "
            "to fit beside the engine; it is planned as "
            f"{policy.update.tokens_per_micro_batch:,} here"
        )


_SLACK = 0.1
"""Share of a run's steps by which its schedule may end earlier or later."""


def schedule_faults(policy: PolicyModule, steps: int) -> Iterator[str]:
    """Yield what is hardly intended of a learning-rate schedule in a run of so many steps."""
    if policy.lr_scheduler is None:
        return
    scheduler = throwaway_scheduler(policy.lr_scheduler, policy.optimizer)
    ends = getattr(scheduler, "total_steps", getattr(scheduler, "T_max", None))
    if ends is not None and abs(ends - steps) > _SLACK * steps:
        yield f"it ends after {ends} optimizer steps, but the run after {steps}; set total_steps"
    warm_up = getattr(scheduler, "warmup_steps", 0)
    if warm_up >= steps:
        yield f"warmup_steps={warm_up} is no less than the run's {steps} steps; lower it"


def _engine(engine: Engine, elements: int) -> str:
    cache = f"{engine.kv_cache_gb:g} GiB" if engine.kv_cache_gb else "the engine's own choice"
    if isinstance(engine, TransformersEngine):
        cache = "as it grows"
    rounded = "" if engine.precision == engine.dtype else f", then rounded to {engine.precision}"
    weights = f"{in_units(engine.weight_bytes(elements))} of weights in {engine.dtype}{rounded}"
    return f"{weights}, KV cache: {cache}"
