"""PooledGym: gymnasium's environments in processes, each at its own pace; one model serves all."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.collector import Agents, EnvError, collector_of, seeded
from lightning_rl.envs.gym import ACTION, Gym
from lightning_rl.envs.gym_player import (
    buffer_of,
    episode_seed,
    place_of,
    same_tensors,
    tensors_of,
    write_rows,
)
from lightning_rl.envs.gym_table import StepTable
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.actor_critic import joint_log_prob, sampled
from lightning_rl.envs.pool_process import serve
from lightning_rl.envs.processes import ProcessesCollector
from lightning_rl.envs.watch import START_S
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.seeding import derived_seed


@configurable
class PooledGym(Gym):
    """A slow environment that gymnasium knows by a name, stepped in several processes.

    The agents choose actions for those environments that wait for one, as soon as enough do.

    Args:
        name: such as ``Humanoid-v5``.
        arguments: of ``gymnasium.make``.
        wrappers: around it, the innermost first.
        workers: processes; each steps its share of the environments.
        min_batch: how many environments are to wait before the agents are asked.
        max_batch: how many are served at once; None: all that wait.
        max_wait: seconds after which fewer than ``min_batch`` are served.
        force_sync: all environments take each step together; then a run that goes on is bit-equal.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        workers: int = 2,
        min_batch: int = 1,
        max_batch: int | None = None,
        max_wait: float = 0.01,
        force_sync: bool = False,
    ) -> None:
        super().__init__(name, arguments, wrappers)
        require_at_least(1, workers=workers, min_batch=min_batch, max_batch=max_batch)
        require_at_least(0, max_wait=max_wait)
        if max_batch is not None and max_batch < min_batch:
            raise ConfigError(
                f"max_batch={max_batch} must be >= min_batch={min_batch}; raise it, or leave it out"
            )
        self.workers = workers
        self.min_batch = min_batch
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.force_sync = force_sync


class _Seat:
    """What is known here of an environment that a process steps."""

    def __init__(self, place: int, seed: int) -> None:
        self.place = place
        self.episode = 0
        self.actions: list[Any] = []
        self._seed = seed

    def where(self) -> str:
        """Which environment, and which step of which episode, for messages."""
        seed = episode_seed(self._seed, self.place, self.episode)
        return place_of(self.place, len(self.actions), self.episode, seed)


class PooledCollector(ProcessesCollector):
    """Steps environments in processes; how many are served together is chance, unless forced."""

    env: PooledGym

    @property
    def exact(self) -> str:
        if self.env.force_sync:
            return ""
        return "which environments are served together is chance; force_sync: true rules it out"

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        count = num_envs or 1
        self._seed = derived_seed(seed, first)
        self._players: Any = [_Seat(first + place, seed) for place in range(count)]
        self._rows = []
        self._asked: dict[int, None] = {}
        """Environments that have something to answer, the longest first."""
        places = [seat.place for seat in self._players]
        shares = [places[i :: self.env.workers] for i in range(min(self.env.workers, count))]
        self._start_processes(serve, shares, seed)
        self._of = {place: index for index, share in enumerate(shares) for place in share}
        self._first = first

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        agent, count = agents[AGENT], len(self._players)
        self._begin(agent)
        self.carried = [len(seat.actions) for seat in self._players]
        table = StepTable(self.agents[AGENT], steps, count)
        acts: dict[str, Any] = {}
        done = [0] * count  # steps of each environment
        waiting, since = list(range(count)), time.monotonic()
        with seeded(derived_seed(self._seed, iteration)), torch.no_grad():
            while any(step < steps for step in done):
                left = sum(step < steps for step in done)
                if self._enough(len(waiting), left, since):
                    served = sorted(waiting)[: self.env.max_batch]
                    waiting = [place for place in waiting if place not in served]
                    self._serve(agent, served, done, table, acts)
                    since = time.monotonic()
                    continue
                for place, *answer in self._answers(since, bool(waiting)):
                    self._take(place, answer, done, table)
                    if done[place] < steps:
                        since = since if waiting else time.monotonic()
                        waiting.append(place)
        self.finished = table.finished
        if "state" in acts:
            acts["begins"] = torch.from_numpy(table.begins.T.copy())
        return table.batch(self.env.name, acts, self._first)

    def _enough(self, waiting: int, left: int, since: float) -> bool:
        """Tell whether those that wait are to be served now."""
        if not waiting:
            return False
        if self.env.force_sync:
            return waiting == left
        patient = time.monotonic() - since < self.env.max_wait
        return waiting >= min(self.env.min_batch, left) or not patient

    def _serve(
        self, agent: Any, served: list[int], done: list[int], table: StepTable, acts: dict[str, Any]
    ) -> None:
        """Choose actions for some environments, and send them."""
        rows = {n: buffer_of(o, len(served)) for n, o in table.space.observations.items()}
        for row, place in enumerate(served):
            write_rows(rows, row, self._rows[place])
        for name, buffer in rows.items():
            for row, place in enumerate(served):
                table.seen[name][done[place], place] = buffer[row]
        state = None if self._state is None else self._state[served]
        seen = {n: torch.from_numpy(buffer).to(agent.device) for n, buffer in rows.items()}
        made, after = agent.act(seen, state)
        drawn = sampled(made, self.greedy)
        where = torch.tensor(served), torch.tensor([done[place] for place in served])
        shape = (len(self._players), table.steps)
        _put(acts, "logprobs", joint_log_prob(made, drawn), where, shape)
        _put(acts.setdefault("actions", {}), ACTION, drawn[ACTION], where, shape)
        if state is not None and self._state is not None and after is not None:
            _put(acts, "state", state, where, shape)
            self._state[served] = after
        for place, action in zip(served, drawn[ACTION].tolist(), strict=True):
            table.begins[done[place], place] = self._begins[place]
            self._players[place].actions.append(action)
            self._send(place, "step", action)
        self.deadline.again()

    def _take(self, place: int, answer: list[Any], done: list[int], table: StepTable) -> None:
        """Note what an environment answered."""
        row, reward, over, cut, ended, fresh = answer
        table.note(done[place], place, reward, row, ended)
        done[place] += 1
        self._begins[place] = over or cut
        if over or cut:
            row = fresh
            seat = self._players[place]
            seat.episode, seat.actions = seat.episode + 1, []
            if self._state is not None:
                self._state[place] = 0
        self._rows[place] = row

    # ---------------------------------------------------------------- processes

    def _send(self, place: int, what: str, value: Any) -> None:
        self._asked[place] = None
        number = self._players[place].place
        self._running.send(self._of[number], (number, what, value))

    def _answers(self, since: float, others_wait: bool) -> Iterable[tuple[Any, ...]]:
        """Answers that are there, or come before those that wait have waited long enough.

        Raises:
            EnvError: if an environment raised, its process is gone, or none answers in time.
        """
        patient = others_wait and not self.env.force_sync
        seconds = self.deadline.left
        if patient:
            seconds = max(0.0, since + self.env.max_wait - time.monotonic())
        ready = list(self._running.answers(max(0.0, seconds)))
        if not ready and self.deadline.left <= 0:
            raise self.deadline.expired(self.where())
        for _, (number, *answer) in ready:
            place = number - self._first
            self._asked.pop(place, None)
            self.deadline.again()
            if len(answer) == 1:
                raise answer[0]
            yield place, *answer

    def where(self) -> str:
        place = next(iter(self._asked), None)
        return "" if place is None else self._players[place].where()

    def _begin(self, agent: Any) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and len(loaded["episodes"]) == len(self._players):
            self._go_on(loaded)
        if not self._rows:
            count = len(self._players)
            for place in range(count):
                self._send(place, "begin", 0)
            self._rows = self._all_rows()
            self._begins = [True] * count
            self._state = agent.begin(count) if agent.state_size else None

    def _go_on(self, state: dict[str, Any]) -> None:
        for place, known in enumerate(state["episodes"]):
            seat = self._players[place]
            seat.episode, seat.actions = known["episode"], list(known["actions"])
            self._send(place, "again", (seat.episode, seat.actions))
        self._rows = self._all_rows()
        for place, (seat, known) in enumerate(zip(self._players, state["episodes"], strict=True)):
            if not same_tensors(tensors_of(self._rows[place]), known["seen"]):
                raise EnvError(f"{self.env.name}: {seat.where()}, {self.NOT_THERE}")
        self._begins = [not known["actions"] for known in state["episodes"]]
        self._state = state["state"]

    def _all_rows(self) -> list[Any]:
        """An answer of each environment, in order of their places; their processes start first."""
        rows: dict[int, Any] = {}
        self.deadline.again(START_S)
        while len(rows) < len(self._players):
            for place, row, *_ in self._answers(time.monotonic(), False):
                rows[place] = row
        return [rows[place] for place in range(len(rows))]


def _put(
    acts: dict[str, Any],
    name: str,
    values: Tensor,
    where: tuple[Tensor, Tensor],
    shape: tuple[int, int],
) -> None:
    """Write values (N, ...) to their places of a tensor (E, T, ...)."""
    values = values.detach().cpu()
    if name not in acts:
        acts[name] = values.new_zeros(*shape, *values.shape[1:])
    acts[name][where] = values


collector_of.register(PooledGym, PooledCollector)
