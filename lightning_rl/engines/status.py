"""Who is doing what: the trainer, the collector, and every replica of the engine."""

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """What a part of a run is doing.

    ``RUNNING``: its work. ``WAITING``: for another part: the trainer for rollouts or a push, the
    collector for new weights, a replica for the end of a pause or for the weights that the others
    hold. ``STOPPED``: nothing, and nothing is to come: not begun yet, over, or dead.
    """

    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One process of an engine: its name, state, the version of its weights, requests in flight."""

    name: str
    state: RunState
    version: int
    in_flight: int
