"""Checks that policies are compatible with the data and the engine, and configures the engine."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.objective import Objective
from lightning_rl.collect.ahead import WorkingAhead
from lightning_rl.collect.checks import (
    check_branching,
    check_collecting,
    check_groups,
    check_teachers,
)
from lightning_rl.collect.collector import Collector, GroupFilter
from lightning_rl.collect.mixture import naming
from lightning_rl.collect.replay_buffer import ReplayBuffer, warn_if_uncorrected
from lightning_rl.collect.tasks import Task
from lightning_rl.engines.base import Engine
from lightning_rl.learn.base import LearningModule
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.models.lora_layers import largest_rank, merged_only
from lightning_rl.vision.reader import reader_of


def check_learning(
    advantage: Advantage,
    objective: Objective,
    settings: UpdateSettings,
    tasks: Sequence[Task],
    collector: Collector,
    filters: Sequence[GroupFilter],
    buffer: ReplayBuffer | None,
    groups_per_iteration: int,
) -> None:
    """Check that a policy can learn from the collected rollouts.

    Raises:
        ConfigError: naming the conflicting keys, and what to change.
    """
    for task in tasks:
        with naming(task.name):
            check_collecting(advantage, filters, task.sampling, task.group_size)
            check_branching(advantage, task.agent)
    check_teachers(advantage, objective.loss, [task.rewards for task in tasks])
    check_groups(groups_per_iteration, settings.minibatches)
    trusts_engine = settings.trust_engine_logprobs
    if isinstance(collector, WorkingAhead) and collector.max_staleness:
        warn_if_uncorrected("asynchronous", objective, trusts_engine)
    if buffer is not None:
        buffer.check(objective, trusts_engine)


def check_sight(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that an engine accepts pictures if the policy's model reads them.

    Raises:
        ConfigError: if it does not.
    """
    if reader_of(tokenizer) is not None:
        engine.require_sight()


def follow_trainer(engine: Engine, module: RolloutModule, computes_in: str) -> None:
    """Tell an engine, before it starts, which roles it serves and how the trainer computes.

    Raises:
        ConfigError: if the engine does not support its settings.
    """
    engine.serve(module.roles)
    engine.follow_dtype(computes_in)
    for name, policy in module.policies.items():
        of_policy = engine.of_policy(name)
        replay = policy.routing_replay
        of_policy.follow_routing(replay is not None and replay.from_engine)
        of_policy.follow_head(policy.cast_lm_head_to_fp32 or computes_in == "float32")
        follow_lora(of_policy, policy)


def follow_lora(engine: Engine, module: LearningModule) -> None:
    """Tell an engine, before it starts, of the LoRA that a module trains, if it trains one.

    Raises:
        ConfigError: if the engine is configured to keep it unmerged, and cannot.
    """
    lora = module.lora
    if lora is None:
        engine.follow_lora(None, lambda: None)
    else:
        obstacle = partial(merged_only, lora, module.model, module.loading, module.vision)
        engine.follow_lora(largest_rank(lora), obstacle)
