"""One iteration's rollouts, in numbers."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_rl.agents.tools import tool_metrics
from lightning_rl.metrics import summarize
from lightning_rl.rewards.log import mean
from lightning_rl.rollout import Rollout, RolloutStatus


def rollout_metrics(
    rollouts: Sequence[Rollout], seconds: float, trainer_version: int
) -> dict[str, float]:
    """``reward/*`` and ``rollout/*`` of a batch; ``seconds`` is the time to generate it."""
    statuses = Counter(r.status for r in rollouts)
    metrics = {f"rollout/{status.value}": float(statuses[status]) for status in RolloutStatus}
    # What a collector cut says nothing of how long rollouts are, or how they end.
    ended = [r for r in rollouts if r.status not in (RolloutStatus.ABORTED, RolloutStatus.EXPIRED)]
    rollouts = ended or rollouts
    tokens = sum(len(r.token_ids) for r in rollouts)
    graded = [r for r in rollouts if r.reward is not None]
    metrics |= {
        "rollout/tokens_mean": tokens / len(rollouts),
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        "rollout/truncated_share": _share(r.finish_reason == "length" for r in rollouts),
        "rollout/failed_share": _share(r.status is RolloutStatus.FAILED for r in rollouts),
    }
    metrics |= tool_metrics(rollouts)
    ages = [
        trainer_version - version
        for r in rollouts
        for version, written in zip(r.versions, r.loss_mask, strict=True)
        if written
    ]
    if ages:
        metrics["rollout/staleness_max"] = float(max(ages))
        metrics["rollout/staleness_mean"] = sum(ages) / len(ages)
    if not graded:
        return metrics
    average, std = summarize([r.reward for r in graded])  # type: ignore[misc]
    metrics |= {"reward/mean": average, "reward/std": std}
    for name in graded[0].reward_parts:
        part = [s for r in graded if (s := r.reward_parts[name]) is not None]
        metrics[f"reward/{name}"], metrics[f"reward/{name}_std"] = summarize(part)
    metrics |= logged_metrics(graded)
    groups: dict[str, set[float | None]] = defaultdict(set)
    for rollout in graded:
        groups[rollout.group_id].add(rollout.reward)
    # Such groups teach a group-relative method nothing.
    metrics["reward/zero_spread_share"] = _share(len(g) == 1 for g in groups.values())
    return metrics


def logged_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """``logged/*``: what reward functions gave ``log_metric``, averaged over the rollouts."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.logged.items():
            values[name].append(value)
    return {f"logged/{name}": mean(numbers) for name, numbers in values.items()}


def _share(flags: object) -> float:
    values = list(flags)  # type: ignore[call-overload]
    return sum(values) / len(values)
