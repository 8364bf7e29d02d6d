"""GymCollector: steps gymnasium environments, and batches policy calls for those that wait."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.collector import (
    Agents,
    Deadline,
    EnvCollector,
    EnvEpisode,
    EnvError,
    raised,
    require_finite_values,
    seeded,
)
from lightning_rl.envs.gym import ACTION, Gym, space_of
from lightning_rl.envs.gym_player import (
    EnvAnswer,
    EnvSeat,
    EnvSlot,
    buffer_of,
    close,
    picture_of,
    tensors_of,
    write_rows,
)
from lightning_rl.envs.gym_table import StepTable
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.actor_critic import sampled
from lightning_rl.errors import require_at_least
from lightning_rl.run.seeding import derived_seed


class GymCollector(EnvCollector):
    """Steps gymnasium environments one after the other, with one policy call for all of them.

    Episodes continue from batch to batch. Each is reset with its own seed, so a checkpoint needs no
    simulator state: it holds the actions of the current episodes, and a resumed run replays them.
    That is bit-equal if an environment is deterministic given its seed.

    Args:
        env: the environment to step.
        max_episode_length: steps after which an episode is truncated; None: the environment's own
            limit.
        max_step_seconds: seconds after which a step is considered hanging.
    """

    deadline: Deadline

    def __init__(self, env: Gym, max_episode_length: int | None, max_step_seconds: float) -> None:
        require_at_least(1, max_episode_length=max_episode_length)
        self.env = env
        self._limit = max_episode_length
        self.deadline = Deadline(max_step_seconds, env.name)
        self._seats: Sequence[EnvSeat] = []
        self._asked: dict[int, tuple[str, tuple[Any, ...]]] = {}  # the longest first
        self._acting: EnvSlot | None = None
        self._rows: list[Any] = []
        self._state: Tensor | None = None
        self._begins: list[bool] = []
        self._seed = 0
        self._loaded: dict[str, Any] | None = None

    @property
    def exact(self) -> str:
        return ""

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        self._seed = derived_seed(seed, first)
        self._rows, self._asked = [], {}
        self._seats = self._seated(seed, range(first, first + (num_envs or 1)))

    def _seated(self, seed: int, places: range) -> Sequence[EnvSeat]:
        """Create environments, and read their observation and action spaces."""
        envs = [self.env.made() for _ in places]
        self.agents = {AGENT: space_of(envs[0])}
        return [EnvSlot(e, seed, p, self._limit) for e, p in zip(envs, places, strict=True)]

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        agent, device, count = agents[AGENT], agents[AGENT].device, len(self._seats)
        self._begin(agent)
        self.carried = [len(seat.actions) for seat in self._seats]
        table = StepTable(self.agents[AGENT], steps, count)
        done = [0] * count  # steps of each environment
        waiting = set(range(count))
        with seeded(derived_seed(self._seed, iteration)), torch.no_grad():
            while waiting or self._asked:
                if served := self._served(waiting):
                    waiting.difference_update(served)
                    self._act(agent, device, served, [done[i] for i in served], table)
                    continue
                for index, answer in self._answers(bool(waiting)):
                    self._take(index, done[index], answer, table)
                    done[index] += 1
                    if done[index] < steps:
                        waiting.add(index)
        self.finished = table.finished
        return table.batch(self.env.name, self._seats[0].place)

    def _act(
        self,
        agent: Any,
        device: torch.device,
        served: list[int],
        steps: list[int],
        table: StepTable,
    ) -> None:
        """Choose actions for some environments, and request their steps."""
        rows, begins = [self._rows[i] for i in served], [self._begins[i] for i in served]
        seen = table.see(steps, served, rows, begins)
        state = None if self._state is None else self._state[served]
        made, after = agent.act({n: o.to(device) for n, o in seen.items()}, state)
        action = sampled(made, self.greedy)[ACTION]
        table.act(made[ACTION], action, state)
        if self._state is not None and after is not None:
            self._state = self._state.to(after.dtype)
            self._state[served] = after
        for i, chosen in zip(served, action.tolist(), strict=True):
            self._ask(i, "act", chosen)

    def _take(self, index: int, step: int, answer: EnvAnswer, table: StepTable) -> None:
        """Record an environment's answer."""
        over = answer.episode is not None
        table.note(step, index, answer.reward, answer.row, answer.episode)
        self._rows[index] = answer.begin if over else answer.row
        self._begins[index] = over
        if over and self._state is not None:
            self._state[index] = 0

    # ---------------------------------------------------------------- stepping

    def _ask(self, index: int, what: str, *arguments: Any) -> None:
        """Request ``begin``, ``again`` or ``act`` of an environment, see :class:`EnvSlot`."""
        self._asked[index] = what, arguments

    def _answers(self, others_wait: bool) -> Iterator[tuple[int, EnvAnswer]]:
        """Yield answers that are ready, or soon will be; ``others_wait``: some wait for an action.

        Raises:
            EnvError: names the environment that raised, and where it was.
        """
        asked, self._asked = self._asked, {}
        for index, (what, arguments) in asked.items():
            seat = self._turn(self._seats[index])
            try:
                answer = getattr(seat, what)(*arguments)
            except BaseException as error:  # whatever an environment raises
                raise raised(self.env.name, self.where(), error) from error
            yield index, answer
        self._acting = None

    def _served(self, waiting: Collection[int]) -> list[int]:
        """Return the waiting environments to be served now, together; []: keep waiting."""
        return [] if self._asked else sorted(waiting)

    def _turn(self, seat: Any) -> Any:
        """Return the environment that steps next in this thread."""
        self.deadline.again()
        self._acting = seat
        return seat

    def where(self) -> str:
        return "" if self._acting is None else self._acting.where()

    def close(self) -> None:
        seats, self._seats = self._seats, []
        close(self.env.name, (seat.env for seat in seats if isinstance(seat, EnvSlot)))

    def abandon(self) -> None:
        self._seats = []

    # ---------------------------------------------------------------- episodes apart

    def play(
        self, agents: Agents, seeds: Sequence[int], greedy: bool, render: bool = False
    ) -> list[EnvEpisode]:
        agent, space = agents[AGENT], self.agents[AGENT]
        device = agent.device
        options = {"render_mode": "rgb_array"} if render else {}
        players: list[EnvSlot] = []
        episodes: dict[int, EnvEpisode] = {}
        pictures: list[list[Any]] = [[] for _ in seeds]
        try:
            for seed in seeds:
                players.append(EnvSlot(self.env.made(**options), seed, 0, self._limit))
            rows = [self._turn(player).begin(0).row for player in players]
            state = agent.begin(len(players)) if agent.state_size else None
            playing = list(range(len(players)))
            with seeded(seeds[0]), torch.no_grad():
                while playing:
                    seen = {n: buffer_of(o, 1, len(playing)) for n, o in space.observations.items()}
                    write_rows(seen, 0, [rows[place] for place in playing])
                    observed = {n: torch.from_numpy(b[0]) for n, b in seen.items()}
                    require_finite_values(
                        self.env.name, {n: o.unsqueeze(1) for n, o in observed.items()}
                    )
                    made, state = agent.act({n: o.to(device) for n, o in observed.items()}, state)
                    chosen = sampled(made, greedy)[ACTION].tolist()
                    for place, action in zip(playing, chosen, strict=True):
                        if render:
                            pictures[place].append(picture_of(players[place].env, self.env.name))
                        rows[place], _, over, cut = self._turn(players[place]).step(action)
                        if over or cut:
                            episodes[place] = players[place].over(over)
                    left = [i for i, place in enumerate(playing) if place not in episodes]
                    playing = [playing[i] for i in left]
                    state = None if state is None else state[left]
        except BaseException as error:  # whatever an environment raises
            raise raised(self.env.name, self.where(), error) from error
        finally:
            self._acting = None
            close(self.env.name, (player.env for player in players))
        return [replace(episodes[i], pictures=pictures[i]) for i in range(len(seeds))]

    # ---------------------------------------------------------------- going on

    def _begin(self, agent: Any) -> None:
        count = len(self._seats)
        if self._loaded is not None:
            if len(self._loaded["episodes"]) == count:  # else new episodes
                self._go_on(self._loaded)
            self._loaded = None
        if not self._rows:
            self._rows = [answer.row for answer in self._all("begin", [(0,)] * count)]
            self._begins = [True] * count
            self._state = agent.begin(count) if agent.state_size else None

    def _go_on(self, state: dict[str, Any]) -> None:
        """Replay the actions of the current episodes."""
        known = state["episodes"]
        answers = self._all("again", [(one["episode"], one["actions"]) for one in known])
        for seat, one, answer in zip(self._seats, known, answers, strict=True):
            now = tensors_of(answer.row)
            same = all(torch.equal(now[name], one["seen"][name]) for name in now)
            if answer.episode is not None or not same:
                raise EnvError(
                    f"{self.env.name}: {seat.where()}, differs from the saved state: the "
                    "environment is not deterministic, so the run cannot be resumed exactly"
                )
        self._rows = [answer.row for answer in answers]
        self._begins = [not one["actions"] for one in known]
        self._state = None if state["state"] is None else state["state"].clone()

    def _all(self, what: str, arguments: list[tuple[Any, ...]]) -> list[EnvAnswer]:
        """Return all environments' answers, each to its own arguments."""
        for index, given in enumerate(arguments):
            self._ask(index, what, *given)
        answers: dict[int, EnvAnswer] = {}
        while self._asked:
            answers.update(self._answers(False))
        return [answers[index] for index in range(len(arguments))]

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        return {
            "episodes": [
                {"episode": s.episode, "actions": list(s.actions), "seen": tensors_of(row)}
                for s, row in zip(self._seats, self._rows, strict=False)  # no rows yet
            ],
            "state": None if self._state is None else self._state.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
