"""Parts of an algorithm that do not go together.

Each check raises a ConfigError that names the keys that contradict each other, and what to change.
"""

from collections.abc import Sequence

from lightning_rl.agents.base import Agent
from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.losses import SFTMix
from lightning_rl.algos.objective import Aggregation, Objective
from lightning_rl.collect.ahead import WorkingAhead
from lightning_rl.collect.collector import Collector, GroupFilter
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.run.dist import world_size
from lightning_rl.sync.schedule import SyncSchedule


def check_collecting(
    advantage: Advantage, filters: Sequence[GroupFilter], sampling: Sampling, group_size: int
) -> None:
    """Check that groups can be compared, kept and scored."""
    if group_size < advantage.min_group_size:
        raise ConfigError(
            f"group_size={group_size} must be >= {advantage.min_group_size} for "
            f"{type(advantage).__name__}, which compares the rollouts of a group; raise it, or use "
            "GAE"
        )
    for group_filter in filters:
        if group_size < group_filter.min_group_size:
            raise ConfigError(
                f"group_size={group_size} must be >= {group_filter.min_group_size} for "
                f"{type(group_filter).__name__}, which would reject every group; raise it, or "
                "remove the filter"
            )
    if sampling.structured_outputs is not None:
        raise ConfigError(
            f"sampling.structured_outputs={sampling.structured_outputs.as_dict()} changes which "
            "tokens can be sampled, and the trainer does not know where: its ratios would not "
            "start at 1; set it in data.eval_sampling only, or reward the form instead"
        )


def check_branching(advantage: Advantage, agent: Agent) -> None:
    """Check that what branches off is told from what it branched off from."""
    if type(agent).branches is not Agent.branches and not advantage.takes_branches:
        raise ConfigError(
            f"agent={type(agent).__name__} adds branches to groups, which "
            f"advantage={type(advantage).__name__} would count as rollouts of their own; set "
            "model.advantage: TreeRLOO, which tells them apart"
        )


def check_groups(groups_per_iteration: int, minibatches: int, ranks: int | None = None) -> None:
    """Check that an iteration's groups can be shared by minibatches and ranks; None: all there are.

    Raises:
        ConfigError: naming both numbers.
    """
    ranks = ranks or world_size()
    if groups_per_iteration % ranks:
        raise ConfigError(
            f"groups_per_iteration={groups_per_iteration} cannot be shared by {ranks} processes; "
            f"make it a multiple of {ranks}"
        )
    if groups_per_iteration < minibatches:
        raise ConfigError(
            f"minibatches={minibatches} exceeds groups_per_iteration={groups_per_iteration}; "
            "a group is never split over minibatches"
        )


MOST_ROLLOUTS = 1 << 20
"""In an iteration, which are in memory at once; the largest that are known take a tenth."""


def check_rollouts(groups_per_iteration: int, group_size: int) -> None:
    """Check that an iteration's rollouts can be held.

    Raises:
        ConfigError: naming both numbers.
    """
    if groups_per_iteration * group_size > MOST_ROLLOUTS:
        raise ConfigError(
            f"groups_per_iteration={groups_per_iteration} x group_size={group_size} are more than "
            f"{MOST_ROLLOUTS:,} rollouts, which no iteration holds at once; lower one, and raise "
            "iterations_per_epoch"
        )


def check_policies(count: int, *, streams: bool, buffer: bool, experts: bool) -> None:
    """Check that several policies can share what is collected."""
    reasons = {
        "data.collector=StreamedCollector works ahead for one; use SyncCollector": streams,
        "data.buffer counts the age of rollouts by one version; leave it out": buffer,
        "data.expert_prompts do not say whose they are; train by SFT first": experts,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if count > 1 and reason is not None:
        raise ConfigError(f"model.policies has {count} policies, and {reason}")


def check_sync(schedules: Sequence[SyncSchedule], collector: Collector) -> None:
    """Check that weights are pushed by one callback, and as often as the collector needs."""
    if len(schedules) > 1:
        raise ConfigError(
            f"trainer.callbacks: there are {len(schedules)} WeightSync, which would push the same "
            "weights again and pause the engine for it; leave one"
        )
    [schedule] = schedules
    if not isinstance(collector, WorkingAhead):
        return
    # The last iteration before a push trains on weights that are so many versions behind.
    behind = schedule.least_updates - 1
    if behind > collector.max_staleness:
        raise ConfigError(
            f"schedule={schedule} of WeightSync leaves the engine up to {behind} versions behind, "
            f"but {type(collector).__name__} may be at most max_staleness="
            f"{collector.max_staleness}; sync every {collector.max_staleness + 1} iterations or "
            f"more often, or raise max_staleness to {behind}"
        )


def check_sleep(level: int | None, schedule: SyncSchedule, collector: Collector) -> None:
    """Check that an engine may sleep while the trainer trains."""
    if level is None:
        return
    if collector.works_between_batches:
        raise ConfigError(
            f"engine sleep_level={level} lets the engine sleep while the trainer trains, and "
            f"{type(collector).__name__} generates then; use SyncCollector, or leave it out"
        )
    if level == 2 and schedule.least_updates > 1:
        raise ConfigError(
            f"engine sleep_level=2 gives up the weights in every iteration, and WeightSync's "
            f"schedule={schedule} does not push them in each; use sleep_level: 1, or FixedSchedule"
        )


def check_streaming(
    advantage: Advantage,
    aggregation: Aggregation,
    *,
    buffer: bool,
    experts: bool,
    of_batch: Sequence[str],
    filtered_minibatches: bool,
    sharded: bool,
    sleeps: bool,
    shared: bool,
    measures: bool,
) -> None:
    """Check that groups can be trained on before their batch is complete."""
    per_group = {advantage: advantage.per_group, aggregation: aggregation.per_group}
    whole = [type(part).__name__ for part, alone in per_group.items() if not alone]
    reasons = {
        f"model's {' and '.join(whole)} may look at the whole batch": bool(whole),
        f"the reward {', '.join(of_batch)} looks at the whole batch": bool(of_batch),
        "data.buffer mixes other groups into the batch": buffer,
        "data.expert_prompts adds rows to the batch": experts,
        "with data.filters it is not known which groups are in the first of several "
        "model.minibatches": filtered_minibatches,
        "sharded weights are gathered by all ranks together": sharded,
        "engine.sleep_level is for an engine that does not generate while the trainer trains": (
            sleeps
        ),
        "rank 0 collects for all ranks from one engine": shared,
        "model.max_tokens_per_pack=auto is measured on a whole one": measures,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ConfigError(
            "data.collector=StreamedCollector trains on groups before their batch is complete, "
            f"but {reason}; use SyncCollector{_INSTEAD if whole else ''}"
        )


_INSTEAD = ", or what compares groups by themselves (GRPO, GAE with whiten=false, TokenMean)"


def check_experts(advantage: Advantage, objective: Objective) -> None:
    """Check that rows without a reward can be trained on."""
    if not isinstance(objective.loss, SFTMix) or advantage.min_group_size < 2:
        raise ConfigError(
            "data.expert_prompts needs model.loss=SFTMix and an advantage that compares groups "
            f"(not {type(advantage).__name__}): expert rows have no reward"
        )


def room_for_prompts(max_length: int, sampling: Sampling) -> int:
    """Tokens that a prompt may have in an engine that takes ``max_length`` with the completion."""
    room = max_length - sampling.max_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt within the "
            f"engine's {max_length} tokens; lower it or raise engine.max_model_len"
        )
    return room
