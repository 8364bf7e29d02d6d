"""Metrics of graded rollouts: of an iteration, and of a policy."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import comb, fsum
from numbers import Real
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.log import mean
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.metrics import summarize


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


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Tool calls per rollout, and the share of them with each kind of error; {} without calls."""
    replies = [
        message
        for rollout in rollouts
        if isinstance(rollout.completion, list)
        for message in rollout.completion
        if message["role"] == "tool"
    ]
    if not replies:
        return {}
    kinds = Counter(message["error"] for message in replies if "error" in message)
    return {
        "tool/calls_mean": len(replies) / len(rollouts),
        "tool/error_share": kinds.total() / len(replies),
    } | {f"tool/error_{kind}": count / len(replies) for kind, count in kinds.items()}


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


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples is right, estimated from ``samples`` >= k of them.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, Codex, eq. 1).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def evaluation_metrics(rollouts: Sequence[Rollout], success_reward: float) -> dict[str, float]:
    """``eval/*``: accuracy, reward, length, truncated share and pass@k for k = 2, 4, ... <= n.

    A rollout is right if its reward reaches ``success_reward``; one that could not be graded or
    generated counts as wrong. Accuracy is the mean over all rollouts, which with n samples per
    prompt is pass@1.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        right[rollout.group_id].append(rollout.graded and rollout.reward >= success_reward)  # type: ignore[operator]
    count = len(rollouts)
    reward_mean, reward_std = summarize([r.reward or 0.0 for r in rollouts])
    metrics = {
        "eval/accuracy": sum(sum(group) for group in right.values()) / count,
        "eval/reward_mean": reward_mean,
        "eval/reward_std": reward_std,
        "eval/tokens_mean": sum(len(r.token_ids) for r in rollouts) / count,
        "eval/truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
    }
    metrics |= {f"eval/{name}": value for name, value in logged_metrics(rollouts).items()}
    smallest = min(len(group) for group in right.values())
    k = 2
    while k <= smallest:
        scores = [pass_at_k(len(group), sum(group), k) for group in right.values()]
        metrics[f"eval/pass@{k}"] = fsum(scores) / len(scores)
        k *= 2
    return metrics


def own_metrics(
    functions: Sequence[Callable[..., dict[str, float]]],
    rollouts: Sequence[Rollout],
    known: Mapping[str, float],
) -> dict[str, float]:
    """``eval/<name>`` of what functions of one's own make of the same rollouts.

    Each is called with all rollouts, group by group, and returns numbers by name.

    Raises:
        ConfigError: naming the function, if it fails, returns something else, or a name that is
            ``known`` or another's.
    """
    metrics: dict[str, float] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            told = function(rollouts)
        except Exception as error:
            raise ConfigError(
                f"data.eval_metrics: {name} raised {type(error).__name__}: {error}"
            ) from error
        for key, value in _numbers(name, told).items():
            if f"eval/{key}" in {**known, **metrics}:
                raise ConfigError(
                    f"data.eval_metrics: {name} returns {key!r}, but eval/{key} is recorded "
                    "already; give it another name"
                )
            metrics[f"eval/{key}"] = value
    return metrics


def _numbers(name: str, told: Any) -> dict[str, float]:
    if not isinstance(told, Mapping) or not all(isinstance(v, Real) for v in told.values()):
        raise ConfigError(
            f"data.eval_metrics: {name} returned {told!r:.80}; it must return numbers by name, as "
            '{"majority": 0.5}'
        )
    return {str(key): float(value) for key, value in told.items()}
