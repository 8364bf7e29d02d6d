"""Logs lost replicas: each reason once, and then how often it occurs."""

import logging
from collections import Counter

from lightning_rl.engines.replicas.replica import Replica

_log = logging.getLogger(__name__)
_TOLD_AGAIN = {10**n for n in range(1, 10)}
"""Counts of equal failures at which the count is logged."""


class Outages:
    """Failures of replicas; equal ones, from all requests and attempts, are counted together."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._since: dict[Replica, Counter[str]] = {}  # each was lost

    def note(self, replica: Replica, why: str) -> None:
        """Record a failure of a replica."""
        self._last[replica.name] = why
        said = self._since.setdefault(replica, Counter())
        said[why] += 1
        if said[why] == 1:
            _log.warning("lost a replica of the engine: %s", why)
        elif said[why] in _TOLD_AGAIN:
            _log.warning("lost a replica of the engine, %d times by now: %s", said[why], why)

    def over(self, replica: Replica) -> None:
        """Record that a replica serves again, or for the first time."""
        failures = self._since.pop(replica, Counter()).total()
        came = "is back" if failures else "has joined the engine"
        _log.warning("%s %s (failures meanwhile: %d)", replica.name, came, failures)

    def __str__(self) -> str:
        """Return the last failure of each replica."""
        return "; ".join(f"{name}: {why}" for name, why in self._last.items()) or "no failure"
