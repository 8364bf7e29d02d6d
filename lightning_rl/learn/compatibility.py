"""Checks that policies are compatible with the data and the engine, and configures the engine."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.objective import Objective
from lightning_rl.collect.checks import (
    check_collecting,
    check_demonstrations,
    check_groups,
    check_growing,
    check_policies,
    check_streaming,
    check_teachers,
)
from lightning_rl.collect.collector import Collector
from lightning_rl.collect.demonstrations import DemonstrationRows
from lightning_rl.collect.mixture import naming
from lightning_rl.collect.prefetch import PrefetchingCollector
from lightning_rl.collect.replay_buffer import ReplayBuffer, warn_if_uncorrected
from lightning_rl.collect.selection import GroupSelection
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.collect.tasks import Task, grader_of
from lightning_rl.engines.base import Engine
from lightning_rl.learn.base import LearningModule
from lightning_rl.learn.lora_layers import largest_rank, merged_only
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.run.processes.dist import world_size
from lightning_rl.vision.reader import reader_of


def check_run(
    module: RolloutModule,
    tasks: Sequence[Task],
    collector: Collector,
    selection: GroupSelection,
    buffer: ReplayBuffer | None,
    demonstrations: DemonstrationRows | None,
    engine: Engine,
    groups_per_iteration: int,
    fits: bool,
) -> None:
    """Check that the policies can learn from the rollouts that will be collected.

    Args:
        module: the policies.
        tasks: the training tasks.
        collector: decides when each group is generated.
        selection: which groups are trained on.
        buffer: mixes older groups into each batch; None: none.
        demonstrations: are imitated in addition; None: none.
        engine: generates.
        groups_per_iteration: groups of all ranks together.
        fits: True if the run trains; others only collect.

    Raises:
        ConfigError: naming the conflicting keys, and what to change.
    """
    streams = isinstance(collector, StreamedCollector)
    added = {"buffer": buffer is not None, "demonstrations": demonstrations is not None}
    check_policies(len(module.policies), streams=streams, **added)
    for policy in module.policies.values():
        if fits:
            learns = policy.advantage, policy.objective, policy.update
            check_learning(*learns, tasks, collector, selection, buffer, groups_per_iteration)
        if fits and streams:
            check_streaming(
                policy.advantage,
                policy.aggregation,
                **added,
                of_batch=grader_of(tasks).of_batch,
                filtered_minibatches=bool(selection.filters) and policy.update.minibatches > 1,
                sharded=policy.device_mesh is not None,
                sleeps=engine.sleep_level is not None,
                shared=engine.serves_all_ranks and world_size() > 1,
                measures=policy.auto_micro_batches is not None,
            )
        if demonstrations is not None:
            check_demonstrations(policy.advantage, policy.objective)


def check_learning(
    advantage: Advantage,
    objective: Objective,
    settings: UpdateSettings,
    tasks: Sequence[Task],
    collector: Collector,
    selection: GroupSelection,
    buffer: ReplayBuffer | None,
    groups_per_iteration: int,
) -> None:
    """Check that a policy can learn from the collected rollouts."""
    for task in tasks:
        with naming(task.name):
            filters, size = selection.filters or [], task.group_size
            check_collecting(advantage, filters, task.sampling, size)
            check_growing(advantage, task.plan)
    check_teachers(advantage, objective.loss, [task.rewards for task in tasks])
    check_groups(groups_per_iteration, settings.minibatches)
    uses_rollout_logprobs = settings.use_rollout_logprobs
    if isinstance(collector, PrefetchingCollector) and collector.max_staleness:
        warn_if_uncorrected("asynchronous", objective, uses_rollout_logprobs)
    if buffer is not None:
        buffer.check(objective, uses_rollout_logprobs)


def check_sight(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that an engine accepts pictures if the policy's model reads them.

    Raises:
        ConfigError: if it does not.
    """
    if reader_of(tokenizer) is not None:
        engine.require_sight()


def configure_engine(engine: Engine, module: RolloutModule, computes_in: str) -> None:
    """Tell an engine, before it starts, which roles it serves and how the trainer computes.

    Raises:
        ConfigError: if the engine does not support its settings.
    """
    engine.serve(module.roles)
    engine.configure_dtype(computes_in)
    for name, policy in module.policies.items():
        of_policy = engine.of_policy(name)
        replay = policy.routing_replay
        of_policy.configure_routing(replay is not None and replay.from_engine)
        of_policy.configure_head(policy.loading.cast_lm_head_to_fp32 or computes_in == "float32")
        configure_lora(of_policy, policy)


def configure_lora(engine: Engine, module: LearningModule) -> None:
    """Tell an engine, before it starts, of the LoRA that a module trains, if it trains one.

    Raises:
        ConfigError: if the engine is configured to keep it unmerged, and cannot.
    """
    lora = module.lora
    if lora is None:
        engine.configure_lora(None, lambda: None)
    else:
        obstacle = partial(merged_only, lora, module.model, module.loading, module.vision)
        engine.configure_lora(largest_rank(lora), obstacle)
