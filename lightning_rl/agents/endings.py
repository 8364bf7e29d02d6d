"""Endings of agents that are programs, as rollouts record and metrics count them."""

from collections import Counter
from collections.abc import Sequence

from lightning_rl.rollout import Rollout

ENDINGS = ("timeout", "exit", "killed", "output", "result", "silent")
"""Endings of a run besides ``done``; all but the first fail its rollout."""
ENDING = "agent_end"
"""The key of ``rollout.extra`` that holds the ending."""


def ending_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of runs with each ending but ``done``, as ``agent/*_share``; {} if none."""
    endings = Counter(r.extra[ENDING] for r in rollouts if ENDING in r.extra)
    if not endings:
        return {}
    return {f"agent/{kind}_share": endings[kind] / endings.total() for kind in ENDINGS}
