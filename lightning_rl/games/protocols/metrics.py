"""Metrics of decisions, over many interactions about rows of data."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from lightning_rl.games.protocols.base import ACCEPT
from lightning_rl.rollout import Rollout


def cut_calls(rollout: Rollout) -> list[bool]:
    """Return for each of a rollout's calls whether ``max_tokens`` cut it off."""
    return [call.finish_reason == "length" for call in rollout.calls]


def protocol_metrics(
    rollouts: Sequence[Rollout], cut: Callable[[Rollout], list[bool]] = cut_calls
) -> dict[str, float]:
    """Return the accuracy of :class:`ProtocolAgent` decisions, for ``data.evaluation.metrics``.

    ``worst_accuracy`` is the lowest accuracy of any prompt, ``accuracy_<class>`` that of the rows
    of a class. ``precision`` and ``recall`` are those of accepting, and 0 if nothing was, or should
    have been, accepted. ``decision_entropy`` is that of accepting, rejecting and neither over all
    rollouts, in nats: 0 if the verifier always does the same. ``undecided_share`` and
    ``guess_share`` are shares of rollouts; ``retry_share`` and ``cut_share`` are shares of calls:
    those repeated because the answer could not be read, and those cut off by ``max_tokens``.
    Rollouts that failed or timed out are left out; returns {} if all are.
    """
    judged = [r for r in rollouts if "label" in r.extra]
    if not judged:
        return {}
    right, classes = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
    for rollout in judged:
        found = rollout.extra["decision"] == rollout.extra["label"]
        right[rollout.group_id].append(found)
        classes[rollout.extra["class"]].append(found)
    accepted = [r for r in judged if r.extra["decision"] == ACCEPT]
    hits = sum(r.extra["label"] == ACCEPT for r in accepted)
    decisions = Counter(r.extra["decision"] for r in judged)
    calls = [was_cut for r in judged for was_cut in cut(r)]
    return {
        "worst_accuracy": min(map(_share, right.values())),
        **{f"accuracy_{name}": _share(classes[name]) for name in sorted(classes)},
        "precision": hits / max(1, len(accepted)),
        "recall": hits / max(1, sum(r.extra["label"] == ACCEPT for r in judged)),
        "decision_entropy": math.fsum(
            -count / len(judged) * math.log(count / len(judged)) for count in decisions.values()
        ),
        "undecided_share": decisions[None] / len(judged),
        "guess_share": _share(r.extra["guesses"] > 0 for r in judged),
        "retry_share": sum(r.extra["retries"] for r in judged) / max(1, len(calls)),
        "cut_share": sum(calls) / max(1, len(calls)),
    }


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / len(listed)
