"""How agents end that are programs, as rollouts record it and metrics count it."""

from collections import Counter
from collections.abc import Sequence

from lightning_rl.rollout import Rollout

ENDINGS = ("timeout", "exit", "killed", "output", "result", "silent")
"""How a run may end besides ``done``; all but the first fail its rollout."""
ENDING = "agent_end"
"""The column of ``rollout.extra`` that says how it ended."""


def ending_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """``agent/*_share``: the share of runs with each ending but ``done``; {} where nothing ran."""
    endings = Counter(r.extra[ENDING] for r in rollouts if ENDING in r.extra)
    if not endings:
        return {}
    return {f"agent/{kind}_share": endings[kind] / endings.total() for kind in ENDINGS}
