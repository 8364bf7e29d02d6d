"""Metrics of graded rollouts: training iterations and evaluations."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from math import fsum
from numbers import Real
from typing import Any

from lightning_rl.agents.endings import ending_metrics
from lightning_rl.collect.estimates import maj_at_k, mean_by_prompt, pass_at_k, share_interval
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rewards.log import mean
from lightning_rl.rollout import Group, Rollout, RolloutStatus
from lightning_rl.run.files.metrics import summarize

_CUT = (RolloutStatus.ABORTED, RolloutStatus.EXPIRED)
"""Statuses of rollouts that a collector cut, whose length and ending carry no information."""
_WASTED_BY = {
    RolloutStatus.SKIPPED: "filters",
    RolloutStatus.ABORTED: "aborts",
    RolloutStatus.EXPIRED: "aborts",
    RolloutStatus.FAILED: "errors",
}
ANSWER = "answer"
"""The column that a reward gives to ``log_extra`` for maj@k: each completion's answer, or None."""


def rollout_metrics(
    rollouts: Sequence[Rollout],
    seconds: float,
    trainer_version: int,
    versions: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Return the ``reward/*`` and ``rollout/*`` metrics of a batch.

    Args:
        rollouts: the batch's rollouts.
        seconds: time spent on generating them.
        trainer_version: the trainer's version, from which staleness is counted.
        versions: the trainer's version by role, if several policies play roles.
    """
    statuses = Counter(r.status for r in rollouts)
    metrics = {f"rollout/{status.value}": float(statuses[status]) for status in RolloutStatus}
    ended = [r for r in rollouts if r.status not in _CUT]
    rollouts = ended or rollouts
    tokens = sum(r.length - (sum(r.shared()) if r.fork else 0) for r in rollouts)
    graded = [r for r in rollouts if r.reward is not None]
    metrics |= {
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        **_endings("rollout", rollouts),
    }
    metrics |= tool_metrics(rollouts) | call_metrics(rollouts) | branch_metrics(rollouts)
    metrics |= ending_metrics(rollouts)
    ages = [
        newest - version
        for r in rollouts
        for row in r.rows
        for newest in [(versions or {}).get(row.role, trainer_version)]
        for version in compress(row.versions, row.loss_mask)
    ]
    if ages:
        metrics["rollout/staleness_max"] = float(max(ages))
        metrics["rollout/staleness_mean"] = sum(ages) / len(ages)
    if not graded:
        return metrics
    metrics |= _graded("reward", graded)
    # Prompt sets may have different rewards.
    for name in dict.fromkeys(name for r in graded for name in r.reward_parts):
        part = [s for r in graded if (s := r.reward_parts.get(name)) is not None]
        metrics[f"reward/{name}"], metrics[f"reward/{name}_std"] = summarize(part)
    return metrics | logged_metrics(graded)


def waste_metrics(rollouts: Sequence[Rollout], cancelled: int) -> dict[str, float]:
    """Return the share of generated tokens that no update uses: in all, and by what wasted them.

    ``cancelled`` counts tokens of requests that were cancelled: no rollout holds them.
    """
    wasted, total = Counter({"aborts": cancelled}), cancelled
    for rollout in rollouts:
        tokens = sum(sum(row.loss_mask) for row in rollout.own_rows())
        total += tokens + rollout.dropped
        wasted["aborts"] += rollout.dropped
        if rollout.status in _WASTED_BY:
            wasted[_WASTED_BY[rollout.status]] += tokens
    shares = {f"rollout/wasted_by_{cause}": wasted[cause] for cause in _WASTED_BY.values()}
    named = {"rollout/wasted_share": wasted.total()} | shares
    return {name: tokens / max(1, total) for name, tokens in named.items()}


def _endings(place: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of the length of rollouts, and of how many were truncated or failed."""
    return {
        f"{place}/tokens_mean": sum(r.length for r in rollouts) / len(rollouts),
        f"{place}/truncated_share": _share(r.finish_reason == "length" for r in rollouts),
        f"{place}/failed_share": _share(r.status is RolloutStatus.FAILED for r in rollouts),
    }


def _graded(place: str, graded: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean and spread of rewards, and the share of groups whose rewards are all equal.

    Such groups teach a group-relative method nothing.
    """
    average, std = summarize([r.reward for r in graded])  # type: ignore[misc]
    groups: dict[str, set[float | None]] = defaultdict(set)
    for rollout in graded:
        groups[rollout.group_id].add(rollout.reward)
    return {
        f"{place}/mean": average,
        f"{place}/std": std,
        f"{place}/zero_spread_share": _share(len(g) == 1 for g in groups.values()),
    }


def set_metrics(groups: Sequence[Group], shares: Mapping[str, float]) -> dict[str, float]:
    """Return ``reward/<set>/*``, ``rollout/<set>/*`` and ``data/<set>/share`` of an iteration.

    ``shares`` is the expected share of each prompt set in the groups drawn from now on. Metrics of
    rollouts leave out those that a collector cut, as in :func:`rollout_metrics`.
    """
    metrics = {f"data/{name}/share": share for name, share in shares.items()}
    for name in shares:
        mine = [group for group in groups if group[0].prompt.set == name]
        metrics[f"rollout/{name}/share"] = len(mine) / len(groups)
        rollouts = [r for group in mine for r in group if r.status not in _CUT]
        if not rollouts:
            continue
        metrics |= _endings(f"rollout/{name}", rollouts)
        graded = [r for r in rollouts if r.reward is not None]
        if graded:
            metrics |= _graded(f"reward/{name}", graded)
    return metrics


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return tool calls per rollout, and the share of each kind of error; {} without calls."""
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


def call_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return rows per rollout, and the number of useless calls and tokens; {} without recorded
    calls.
    """
    recorded = [r for r in rollouts if r.calls]
    if not recorded:
        return {}
    rows = [[row for row in r.rows if row.token_ids] for r in recorded]
    unscorable = [call for r in recorded for call in r.calls if not call.scorable]
    dropped = sum(r.dropped for r in rollouts)
    return {
        "rollout/calls_per_episode": sum(len(r.calls) for r in recorded) / len(recorded),
        "rollout/rows_per_episode": sum(map(len, rows)) / len(recorded),
        # A role's first row is no miss.
        "rollout/merge_misses": float(sum(len(own) - len({r.role for r in own}) for own in rows)),
        "rollout/unscorable_calls": float(len(unscorable)),
        "rollout/dropped_tokens": float(dropped + sum(c.stop - c.start for c in unscorable)),
    }


def branch_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return branches per rollout, and the share of tokens that branches copied; {} without
    branches.
    """
    branches = [r for r in rollouts if r.fork is not None]
    if not branches:
        return {}
    shared = sum(sum(branch.shared()) for branch in branches)
    return {
        "rollout/branches_per_rollout": len(branches) / max(1, len(rollouts) - len(branches)),
        "rollout/shared_token_share": shared / max(1, sum(r.length for r in rollouts)),
    }


def logged_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return ``logged/*``: the numbers passed to ``log_metric``, averaged over the rollouts."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.logged.items():
            values[name].append(value)
    return {f"logged/{name}": mean(numbers) for name, numbers in values.items()}


def _share(flags: object) -> float:
    values = list(flags)  # type: ignore[call-overload]
    return sum(values) / len(values)


def evaluation_metrics(
    rollouts: Sequence[Rollout], success_reward: Mapping[str, float | None]
) -> dict[str, float]:
    """Return ``eval/*``: accuracy, reward, length, truncated share and pass@k, k = 2, 4, ... <= n.

    A rollout is correct if its reward reaches its set's ``success_reward``; one that could not be
    generated or graded counts as wrong. Accuracy is the mean over all rollouts, which is pass@1
    with n samples per prompt. Where a reward gives the ``extra`` ``answer`` (:data:`ANSWER`), there
    is maj@k too. Each of these has its 95 % interval over prompts, ``_low`` and ``_high``.
    ``eval/<set>/*`` are the metrics of each named set; a set without rollouts is left out. A set
    whose value is None has no accuracy, pass@k or maj@k, and does not count in those of the whole.
    If the reward has several parts, ``eval/reward/<part>`` are their means.

    Raises:
        DataError: without any rollouts, or for a rollout of a set without ``success_reward``.
    """
    if not rollouts:
        raise DataError("there are no rollouts to evaluate; generate some, e.g. with evaluate()")
    right = [_is_right(rollout, success_reward) for rollout in rollouts]
    metrics = _held_out("eval", rollouts, right)
    for name in filter(None, success_reward):
        mine = [i for i, rollout in enumerate(rollouts) if rollout.prompt.set == name]
        if mine:
            own = [rollouts[i] for i in mine], [right[i] for i in mine]
            metrics |= _held_out(f"eval/{name}", *own)
    return metrics


def _is_right(rollout: Rollout, success_reward: Mapping[str, float | None]) -> bool | None:
    """Tell whether a rollout is correct; None if no rollout of its set can be."""
    if rollout.prompt.set not in success_reward:
        raise DataError(
            f"rollout {rollout.id} belongs to the prompt set {rollout.prompt.set!r}, which has "
            f"no success_reward; the sets with one are {', '.join(map(repr, success_reward))}"
        )
    bar = success_reward[rollout.prompt.set]
    if bar is None:
        return None
    return rollout.completed and rollout.reward is not None and rollout.reward >= bar


def _held_out(
    place: str, rollouts: Sequence[Rollout], flags: Sequence[bool | None]
) -> dict[str, float]:
    """Return all metrics of an evaluation's rollouts, or of those of one set."""
    count = len(rollouts)
    reward_mean, reward_std = summarize([r.reward or 0.0 for r in rollouts])
    return {
        **_accuracies(place, rollouts, flags),
        f"{place}/reward_mean": reward_mean,
        f"{place}/reward_std": reward_std,
        **{f"{place}/reward/{name}": value for name, value in _part_means(rollouts).items()},
        f"{place}/tokens_mean": sum(r.length for r in rollouts) / count,
        f"{place}/truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
        **{f"{place}/{name}": value for name, value in logged_metrics(rollouts).items()},
    }


def _part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each part of the reward; {} unless there are several.

    A rollout that could not be graded counts as 0, as it does in the mean reward.
    """
    sets: dict[str, set[str]] = defaultdict(set)  # which may have different rewards
    for rollout in rollouts:
        for name in rollout.reward_parts:
            sets[name].add(rollout.prompt.set)
    means = {}
    for name, own in sets.items():
        mine = [r for r in rollouts if r.prompt.set in own]
        scores = [0.0 if r.reward is None else r.reward_parts.get(name) for r in mine]
        if applying := [score for score in scores if score is not None]:
            means[name] = mean(applying)
    return means if len(sets) > 1 else {}


def _accuracies(
    place: str, rollouts: Sequence[Rollout], flags: Sequence[bool | None]
) -> dict[str, float]:
    """Return accuracy, pass@k and maj@k of the rollouts that can be correct, if there are any."""
    groups: dict[str, list[tuple[bool, Any]]] = defaultdict(list)
    for rollout, flag in zip(rollouts, flags, strict=True):
        if flag is not None:
            groups[rollout.group_id].append((flag, rollout.extra.get(ANSWER)))
    if not groups:
        return {}
    right = [[flag for flag, _ in group] for group in groups.values()]
    answers = [[answer for _, answer in group] for group in groups.values()]
    sizes = list(map(len, right))
    metrics = _share_metrics(f"{place}/accuracy", list(map(sum, right)), sizes, sum(sizes))
    votes = any(answer is not None for own in answers for answer in own)
    k = 2
    while k <= min(sizes):
        ones, blocks = [1] * len(sizes), sum(size // k for size in sizes)
        passed = [pass_at_k(len(own), sum(own), k) for own in right]
        metrics |= _share_metrics(f"{place}/pass@{k}", passed, ones, blocks)
        if votes:
            voted = [maj_at_k(*own, k) for own in zip(answers, right, strict=True)]
            metrics |= _share_metrics(f"{place}/maj@{k}", voted, ones, blocks)
        k *= 2
    return metrics


def _share_metrics(
    name: str, totals: Sequence[float], counts: Sequence[int], draws: int
) -> dict[str, float]:
    low, high = share_interval(totals, counts, draws)
    return {name: fsum(totals) / sum(counts), f"{name}_low": low, f"{name}_high": high}


def scores_by_prompt(
    rollouts: Sequence[Rollout], success_reward: Mapping[str, float | None]
) -> dict[str, dict[str, float]]:
    """Return ``accuracy`` and ``reward`` of each prompt that has them, by its key; ungraded
    rollouts have no reward.
    """
    right = ((r.prompt.key, _is_right(r, success_reward)) for r in rollouts)
    graded = [r for r in rollouts if r.reward is not None]
    return {
        "accuracy": mean_by_prompt((key, flag) for key, flag in right if flag is not None),
        "reward": mean_by_prompt((r.prompt.key, r.reward or 0.0) for r in graded),
    }


def own_metrics(
    functions: Sequence[Callable[..., dict[str, float]]],
    rollouts: Sequence[Rollout],
    known: Mapping[str, float],
) -> dict[str, float]:
    """Return ``eval/<name>`` as computed by user functions from the same rollouts.

    Each function is called with all rollouts, group by group, and returns numbers by name.

    Raises:
        ConfigError: naming the function, if it fails, does not return numbers by name, or returns a
            name that is in ``known`` or that another function returned.
    """
    metrics: dict[str, float] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            told = function(rollouts)
        except Exception as error:
            raise ConfigError(
                f"data.evaluation.metrics: {name} raised {type(error).__name__}: {error}"
            ) from error
        for key, value in _numbers(name, told).items():
            if f"eval/{key}" in {**known, **metrics}:
                raise ConfigError(
                    f"data.evaluation.metrics: {name} returns {key!r}, but eval/{key} is already "
                    "recorded; use another name"
                )
            metrics[f"eval/{key}"] = value
    return metrics


def _numbers(name: str, told: Any) -> dict[str, float]:
    if not isinstance(told, Mapping) or not all(isinstance(v, Real) for v in told.values()):
        raise ConfigError(
            f"data.evaluation.metrics: {name} returned {told!r:.80}; it must return numbers by "
            'name, as {"majority": 0.5}'
        )
    return {str(key): float(value) for key, value in told.items()}
