"""Checks that the parts of an algorithm are compatible.

Each check raises a ConfigError that names the conflicting keys, and what to change.
"""

from collections.abc import Sequence

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.losses import PolicyLoss, SFTMix
from lightning_rl.algos.objective import Aggregation, Objective
from lightning_rl.collect.collector import Collector, GroupFilter
from lightning_rl.collect.prefetch import PrefetchingCollector
from lightning_rl.data.plans import GroupPlan
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.teachers import Teacher
from lightning_rl.run.processes.dist import world_size
from lightning_rl.sync.schedule import SyncSchedule


def check_collecting(
    advantage: Advantage, filters: Sequence[GroupFilter], sampling: Sampling, group_size: int
) -> None:
    """Check that groups can be compared, filtered and scored."""
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
            f"sampling.structured_outputs={sampling.structured_outputs.as_dict()} restricts which "
            "tokens can be sampled, but the trainer scores them without that restriction, so its "
            "probability ratios would not start at 1; set it in data.evaluation only, or reward "
            "the format instead"
        )


def check_growing(advantage: Advantage, plan: GroupPlan) -> None:
    """Check that the advantage distinguishes branches from the rollouts they branched off from."""
    if type(plan).grow is not GroupPlan.grow and not advantage.takes_branches:
        raise ConfigError(
            f"plan={type(plan).__name__} adds branches to groups, which "
            f"advantage={type(advantage).__name__} would count as independent rollouts; set "
            "model.advantage: TreeRLOO, which distinguishes them"
        )


def check_teachers(advantage: Advantage, loss: PolicyLoss, rewards: Sequence[Rewards]) -> None:
    """Check that a teacher looks at rollouts, and tells as much as is learned from it."""
    functions: list[object] = [f for one in rewards for f in one.functions.values()]
    found = [function for function in functions if isinstance(function, Teacher)]
    for key, part in (("advantage", advantage), ("loss", loss)):
        if part.needs_teacher and not found:
            raise ConfigError(
                f"model.{key}={type(part).__name__} learns from a teacher, but data.rewards has "
                "none; add ModelTeacher or ServedTeacher"
            )
    if loss.needs_teacher and not any(teacher.top_k for teacher in found):
        raise ConfigError(
            f"model.loss={type(loss).__name__} compares with the tokens that a teacher finds "
            "likeliest, but the teachers in data.rewards have top_k=0; set it, to 16 for example"
        )


def check_groups(groups_per_iteration: int, minibatches: int, ranks: int | None = None) -> None:
    """Check that an iteration's groups can be divided among minibatches and ranks.

    Args:
        groups_per_iteration: groups of all ranks together.
        minibatches: minibatches per update.
        ranks: number of processes; None: the current world size.

    Raises:
        ConfigError: naming both numbers.
    """
    ranks = ranks or world_size()
    if groups_per_iteration % ranks:
        raise ConfigError(
            f"groups_per_iteration={groups_per_iteration} cannot be divided among {ranks} "
            f"processes; make it a multiple of {ranks}"
        )
    if groups_per_iteration < minibatches:
        raise ConfigError(
            f"minibatches={minibatches} exceeds groups_per_iteration={groups_per_iteration}; lower "
            "it, since a group is never split over minibatches"
        )


MOST_ROLLOUTS = 1 << 20
"""Maximum rollouts of an iteration, all of which are in memory at once. The largest known runs use
a tenth of it.
"""


def check_rollouts(groups_per_iteration: int, group_size: int) -> None:
    """Check that an iteration's rollouts fit into memory.

    Raises:
        ConfigError: naming both numbers.
    """
    if groups_per_iteration * group_size > MOST_ROLLOUTS:
        raise ConfigError(
            f"groups_per_iteration={groups_per_iteration} x group_size={group_size} must be at "
            f"most {MOST_ROLLOUTS:,} rollouts, since an iteration holds all of them in memory; "
            "lower one, and raise iterations_per_epoch"
        )


def check_policies(count: int, *, streams: bool, buffer: bool, demonstrations: bool) -> None:
    """Check that several policies can share the collected rollouts."""
    reasons = {
        "data.collector=StreamedCollector supports a single one; use SyncCollector": streams,
        "data.buffer measures staleness by a single version; leave it out": buffer,
        "data.demonstrations do not say which one imitates them; train by SFT first": (
            demonstrations
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if count > 1 and reason is not None:
        raise ConfigError(f"model.policies has {count} policies, but {reason}")


def check_sync(schedules: Sequence[SyncSchedule], collector: Collector) -> None:
    """Check that one callback pushes weights, and as often as the collector needs."""
    if len(schedules) > 1:
        raise ConfigError(
            f"trainer.callbacks: there are {len(schedules)} WeightSync callbacks, which would push "
            "the same weights repeatedly and pause the engine each time; keep one"
        )
    [schedule] = schedules
    if not isinstance(collector, PrefetchingCollector):
        return
    # The last iteration before a push trains on weights that are so many versions behind.
    behind = schedule.least_updates - 1
    if behind > collector.max_staleness:
        raise ConfigError(
            f"schedule={schedule} of WeightSync lets the engine fall up to {behind} versions "
            f"behind, but {type(collector).__name__} allows at most "
            f"max_staleness={collector.max_staleness}; sync every {collector.max_staleness + 1} "
            f"iterations or more often, or raise max_staleness to {behind}"
        )


def check_sleep(level: int | None, schedule: SyncSchedule, collector: Collector) -> None:
    """Check that the engine is idle while it sleeps, and has its weights pushed afterwards."""
    if level is None:
        return
    if collector.works_between_batches:
        raise ConfigError(
            f"engine sleep_level={level} puts the engine to sleep while the trainer trains, but "
            f"{type(collector).__name__} generates during that time; use SyncCollector, or leave "
            "sleep_level out"
        )
    if level == 2 and schedule.least_updates > 1:
        raise ConfigError(
            "engine sleep_level=2 discards the engine's weights in every iteration, but "
            f"schedule={schedule} of WeightSync does not push them in each; use sleep_level: 1, or "
            "FixedSchedule"
        )


def check_streaming(
    advantage: Advantage,
    aggregation: Aggregation,
    *,
    buffer: bool,
    demonstrations: bool,
    of_batch: Sequence[str],
    filtered_minibatches: bool,
    sharded: bool,
    sleeps: bool,
    shared: bool,
    measures: bool,
) -> None:
    """Check that training on groups can begin before their batch is complete."""
    per_group = {advantage: advantage.per_group, aggregation: aggregation.per_group}
    whole = [type(part).__name__ for part, alone in per_group.items() if not alone]
    reasons = {
        f"model's {' and '.join(whole)} may need the whole batch": bool(whole),
        f"the reward {', '.join(of_batch)} needs the whole batch": bool(of_batch),
        "data.buffer mixes other groups into the batch": buffer,
        "data.demonstrations adds rows to the batch": demonstrations,
        "data.selection.filters leaves open which groups are in the first of several "
        "model.update.minibatches": filtered_minibatches,
        "sharded weights are gathered by all ranks at once": sharded,
        "engine.sleep_level requires an engine that is idle while the trainer trains": sleeps,
        "rank 0 collects for all ranks from one engine": shared,
        "model.update.max_tokens_per_micro_batch=auto is measured on a complete batch": measures,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ConfigError(
            "data.collector=StreamedCollector trains on groups before their batch is complete, "
            f"but {reason}; use SyncCollector{_INSTEAD if whole else ''}"
        )


_INSTEAD = ", or parts that need one group at a time (GRPO, GAE with whiten=false, TokenMean)"


def check_demonstrations(advantage: Advantage, objective: Objective) -> None:
    """Check that the loss and the advantage support demonstrations, which have no reward."""
    if not isinstance(objective.loss, SFTMix) or advantage.min_group_size < 2:
        raise ConfigError(
            "data.demonstrations adds rows without a reward; set model.loss: SFTMix and an "
            f"advantage that compares the rollouts of a group (not {type(advantage).__name__})"
        )
