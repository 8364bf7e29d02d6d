"""A worker process: it has its own agents, which play its environments."""

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rl.envs.collector import Deadline, EnvEpisode
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.processes import PipeEnd
from lightning_rl.envs.watch import Watch


@dataclass(frozen=True)
class WorkerBatch:
    """The result of one process: a batch in ``GymCollector``'s form, and the state after it."""

    batch: Any
    finished: list[EnvEpisode]
    carried: list[int]
    state: dict[str, Any]


class _Beating(Deadline):
    """A deadline that also tells the waiting process, now and then, that steps are being taken."""

    def __init__(self, seconds: float, what: str, line: PipeEnd) -> None:
        super().__init__(seconds, what)
        self._line = line
        self._every = min(1.0, seconds / 4)
        self._next = 0.0

    def again(self, seconds: float | None = None) -> None:
        super().again(seconds)
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._every
            self._line.send(None)


class EnvWorker:
    """Agents and their environments, in a process; while they play, None is a sign of life."""

    def __init__(
        self,
        line: PipeEnd,
        places: Sequence[int],
        env: Gym,
        seed: int,
        limit: int | None,
        max_step_seconds: float,
    ) -> None:
        torch.set_num_threads(1)  # each of the processes has a core
        self.agents: dict[str, EnvAgent] = {}
        self.collector = GymCollector(env, limit, max_step_seconds)
        self.collector.deadline = _Beating(max_step_seconds, env.name, line)
        self.watch = Watch(self.collector, env.name)
        self.watch.start(seed, places[0], len(places))
        self.close = self.watch.close

    def have(self, agents: bytes) -> None:
        """Take agents."""
        self.agents = pickle.loads(agents)

    def become(self, snapshots: Mapping[str, Mapping[str, Any]]) -> None:
        """Load snapshots into the agents."""
        for name, snapshot in snapshots.items():
            self.agents[name].become(snapshot)

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.collector.load_state_dict(state)

    def play(
        self, iteration: int, steps: int, autocast: torch.dtype | None, greedy: bool
    ) -> WorkerBatch:
        """Play the next steps of an iteration; ``autocast``: the dtype in which agents act."""
        own = self.collector
        own.greedy = greedy
        batch = self.watch(
            lambda: own.collect(self.agents, iteration, steps),
            lambda: nullcontext() if autocast is None else torch.autocast("cpu", autocast),
        )
        return WorkerBatch(batch, list(own.finished), list(own.carried), own.state_dict())
