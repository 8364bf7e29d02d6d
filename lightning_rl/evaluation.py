"""What a set of graded rollouts says about a policy."""

from collections import defaultdict
from collections.abc import Sequence
from math import comb, fsum

from lightning_rl.collect.stats import logged_metrics
from lightning_rl.rollout import Rollout


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples is right, estimated from ``samples`` >= k of them.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, Codex, eq. 1).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def evaluation_metrics(rollouts: Sequence[Rollout], success_reward: float) -> dict[str, float]:
    """``eval/*``: accuracy, mean reward, length, truncated share, pass@k for k = 2, 4, ... <= n.

    A rollout is right if its reward reaches ``success_reward``; one that could not be graded or
    generated counts as wrong. Accuracy is the mean over all rollouts, which with n samples per
    prompt is pass@1.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        right[rollout.group_id].append(rollout.graded and rollout.reward >= success_reward)  # type: ignore[operator]
    count = len(rollouts)
    metrics = {
        "eval/accuracy": sum(sum(group) for group in right.values()) / count,
        "eval/reward_mean": fsum(r.reward or 0.0 for r in rollouts) / count,
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
