"""GymWorkers: gymnasium environments in processes that have their own agents."""

import copy
import pickle
import time
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import RunState
from lightning_rl.envs.collector import Agents
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.processes import ProcessesCollector, without_main
from lightning_rl.envs.watch import END_S, START_S
from lightning_rl.envs.workers_process import EnvWorker, WorkerBatch
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.sync.schedule import CollectorStatus, FixedSchedule, SyncSchedule, SyncState


@configurable
class GymWorkers(Gym):
    """A gymnasium environment, given by name, that is played in several processes at once.

    Each process has a copy of the agents and a share of the environments, so all cores collect.
    Agents are sent to the processes before the first batch, then as the schedule decides.

    Args:
        name: such as ``Humanoid-v5``.
        arguments: passed to ``gymnasium.make``.
        wrappers: wrappers of the environment, the innermost first.
        workers: number of processes.
        sync: schedule of sending agents.
        max_staleness: how many iterations older the agents that played a batch may be than those
            that learn from it; they are sent before they exceed it, whatever the schedule says.
        force_sync: the processes play only while the trainer waits. False: they play the next batch
            during the update, with agents that are one iteration older.

    Raises:
        ConfigError: for values that are out of range or contradict each other.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        workers: int = 2,
        sync: SyncSchedule = FixedSchedule(),
        max_staleness: int = 0,
        force_sync: bool = True,
    ) -> None:
        super().__init__(name, arguments, wrappers)
        require_at_least(1, workers=workers)
        require_at_least(0, max_staleness=max_staleness)
        self.workers = workers
        self.sync = sync
        self.max_staleness = max_staleness
        self.force_sync = force_sync
        oldest = sync.least_updates - 1 + (not force_sync)
        if oldest > max_staleness:
            raise ConfigError(
                f"sync={sync} with force_sync={force_sync} leaves agents up to {oldest} iterations "
                f"behind, but max_staleness={max_staleness}; raise max_staleness to {oldest}, or "
                "send them more often"
            )


class WorkersCollector(ProcessesCollector):
    """Plays environments in processes.

    Each process is a ``GymCollector`` of its share, like a rank: its actions are sampled with the
    share's own seed, so another number of processes plays other episodes.
    """

    env: GymWorkers

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        count = num_envs or 1
        places = torch.arange(first, first + count)
        self._shares = [s.tolist() for s in places.tensor_split(min(self.env.workers, count))]
        self._start_processes(EnvWorker, self._shares, seed, self.deadline.seconds)
        self._found: dict[int, WorkerBatch] = {}
        """What processes have returned of the current batch."""
        self._heard = False
        """True once all processes have started and played a batch."""
        self._has_agents = False
        self._version: int | None = None
        """The iteration of the processes' agents; None: they have none yet."""
        self._sent: dict[str, Any] = {}
        """Snapshots of these agents, by name."""
        self._playing = False
        """True if a batch was requested but not yet returned."""
        self._after: dict[str, Any] = {"episodes": [], "state": None}
        """State of the environments after the last returned batch."""

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        self._told: dict[str, float] = {}
        if not self._playing:
            self._begin_batch(agents, iteration, iteration, steps)
        played = self._played()
        assert self._version is not None
        self._told["rollout/version"] = float(self._version)
        self._told["rollout/staleness_max"] = float(iteration - self._version)
        self._playing = False
        self._after = _joined([share.state for share in played])
        self.finished = [episode for share in played for episode in share.finished]
        self.carried = [length for share in played for length in share.carried]
        if not self.env.force_sync:
            self._begin_batch(agents, iteration, iteration + 1, steps)
        self.metrics = self._told
        return _together([share.batch for share in played])

    def _begin_batch(self, agents: Agents, trained: int, iteration: int, steps: int) -> None:
        """Let the processes play an iteration's batch; ``trained``: iterations trained so far."""
        goes_on = self._begin_processes(agents)
        # Working ahead, a run that was stopped here had decided already.
        if not (goes_on and not self.env.force_sync) and self._is_due(trained, iteration):
            begin = time.perf_counter()
            self._version = trained
            self._sent = {name: agent.snapshot() for name, agent in agents.items()}
            with self.syncing(trained):
                self._tell_all("become", self._sent)
            self._told["sync/version"] = float(trained)
            self._told["sync/seconds"] = time.perf_counter() - begin
        kind = agents[AGENT].device.type
        on = torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if on else None
        self._tell_all("play", iteration, steps, autocast, self.greedy)
        self._playing = True

    def _is_due(self, trained: int, iteration: int) -> bool:
        """Return True if the agents must be sent before the batch of an iteration is played."""
        if self._version is None:
            return True
        fresh = iteration - self._version <= self.env.max_staleness
        collector = CollectorStatus(may_issue=fresh, used_up=not fresh)
        state = SyncState(trained, self._version, collector, RunState.WAITING)
        return not fresh or self.env.sync.should_sync(state)

    def _played(self) -> list[WorkerBatch]:
        """Return what all processes have played, by process.

        Raises:
            EnvError: if an environment raised or hangs, or a process died.
        """
        found = self._found = dict[int, WorkerBatch]()
        while len(found) < len(self._shares):
            # A process says by itself what hangs, unless it hangs where Python cannot stop it.
            self.deadline.again(self.deadline.seconds + 2 * END_S if self._heard else START_S)
            answers = list(self._running.answers(self.deadline.left))
            if not answers:
                raise self.deadline.expired(self.where())
            for index, answer in answers:
                if answer is not None:
                    found[index] = answer
        self._heard = True
        return [found[index] for index in range(len(found))]

    def where(self) -> str:
        late = [share for index, share in enumerate(self._shares) if index not in self._found]
        return f"one of environments {', '.join(str(p) for share in late for p in share)}"

    # ---------------------------------------------------------------- processes

    def _tell_all(self, *request: Any) -> None:
        for index in range(len(self._shares)):
            self._running.send(index, request)

    def _begin_processes(self, agents: Agents) -> bool:
        """Send the processes their initial state, once; return True if they resume a run."""
        if self._has_agents:
            return False
        self._has_agents = True
        self._tell_all("have", _pickled(agents))
        state, self._loaded = self._loaded, None
        if state is None:
            return False
        self._place(state)
        if state.get("version") is None:
            return False
        self._version, self._sent = state["version"], state["agents"]
        self._tell_all("become", self._sent)
        return True

    def _place(self, state: dict[str, Any]) -> None:
        """Restore the environments, if their number is unchanged."""
        episodes, memory = state["episodes"], state["state"]
        if len(episodes) != sum(map(len, self._shares)):
            return
        self._after = {"episodes": episodes, "state": memory}
        for index, share in enumerate(self._shares):
            own = slice(share[0] - self._shares[0][0], share[-1] + 1 - self._shares[0][0])
            kept = None if memory is None else memory[own]
            self._running.send(index, ("go_on", {"episodes": episodes[own], "state": kept}))

    # ---------------------------------------------------------------- going on

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        return self._after | {"version": self._version, "agents": self._sent}


def _pickled(agents: Agents) -> bytes:
    """Pickle the agents for another process.

    Raises:
        ConfigError: if one of them cannot be pickled.
    """
    copies = {name: copy.deepcopy(agent).cpu() for name, agent in agents.items()}
    try:
        with without_main():  # where processes do not find what it has
            return pickle.dumps(copies)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"GymWorkers sends agents to processes, but one of them cannot be pickled: {error}; "
            "define its classes in a module of their own, or use PooledGym"
        ) from error


def _joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all shares into one ``GymCollector`` state."""
    memories = [state["state"] for state in states]
    return {
        "episodes": [episode for state in states for episode in state["episodes"]],
        "state": None if memories[0] is None else torch.cat(memories),
    }


def _together(batches: list[TensorDict]) -> TensorDict:
    """Merge the batches of all shares into one."""
    before = 0
    for batch in batches:
        batch["ends", "place"] += before
        before += batch["steps"].numel()
    return TensorDict({part: torch.cat([b[part] for b in batches]) for part in ("steps", "ends")})
