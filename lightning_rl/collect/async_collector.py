"""Collectors whose engine works while the trainer does."""

import asyncio

from lightning_rl.arguments import configurable
from lightning_rl.collect.ahead import WorkingAhead
from lightning_rl.errors import require_at_least


@configurable
class AsyncCollector(WorkingAhead):
    """Keeps the engine busy while the trainer trains (AReaL, Fu et al. 2025, section 5.1).

    Rollouts in flight when weights are synced go on with the new ones, and say for each token which
    version wrote it. With ``max_staleness=0`` nothing is generated ahead: that is
    ``SyncCollector``, but for the order of groups.

    Args:
        max_staleness: versions by which a token may be older than the policy that trains on it.
        max_groups_in_flight: groups generated at the same time; None: as many as staleness allows.
    """

    works_between_batches = True

    def __init__(self, max_staleness: int = 1, max_groups_in_flight: int | None = None) -> None:
        super().__init__(max_staleness)
        require_at_least(1, max_groups_in_flight=max_groups_in_flight)
        self.max_groups_in_flight = max_groups_in_flight

    def _allowance(self) -> int:
        if self.max_groups_in_flight is None:
            return 2**62
        return self.max_groups_in_flight + len(self._done)


class OneStepOffCollector(AsyncCollector):
    """Generates the next batch while the trainer trains on this one (one-step off-policy).

    Weights change only when that batch is done, so every rollout is of a single version, exactly
    one behind from the second iteration on (Noukhovitch et al. 2024, "Asynchronous RLHF").
    """

    def __init__(self) -> None:
        super().__init__(max_staleness=1)

    async def before_sync(self) -> None:
        while self._running and self._failure is None:
            await asyncio.wait(list(self._running))
