"""GymCollector: steps gymnasium environments one by one, and the policy for all of them at once."""

from collections.abc import Sequence
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
    collector_of,
    raised,
    require_finite_values,
    seeded,
)
from lightning_rl.envs.gym import ACTION, Gym, space_of
from lightning_rl.envs.gym_player import (
    EnvSlot,
    buffer_of,
    close,
    picture_of,
    same_tensors,
    tensors_of,
    write_rows,
)
from lightning_rl.envs.gym_table import StepTable
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.actor_critic import sampled
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.errors import require_at_least
from lightning_rl.run.seeding import derived_seed


class GymCollector(EnvCollector):
    """Steps gymnasium environments one after the other, and the policy for all of them at once.

    Episodes go on from batch to batch. Each is reset with a seed of its own, so a checkpoint needs
    no simulator's state: it holds what was done in the episodes at hand, and going on does it
    again, which is bit-equal wherever an environment plays the same from the same seed.

    Args:
        env: what to step.
        max_episode_length: steps after which an episode is cut; None: as the environment has it.
        max_step_seconds: after which an environment hangs.
    """

    deadline: Deadline
    NOT_THERE = (
        "is not where it was when the checkpoint was saved: it does not play the same from the "
        "same seed, so the run cannot be gone on with as it was"
    )

    def __init__(self, env: Gym, max_episode_length: int | None, max_step_seconds: float) -> None:
        require_at_least(1, max_episode_length=max_episode_length)
        self.env = env
        self._limit = max_episode_length
        self.deadline = Deadline(max_step_seconds, env.name)
        self._players: list[EnvSlot] = []
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
        envs = [self.env.made() for _ in range(num_envs or 1)]
        self.agents = {AGENT: space_of(envs[0])}
        self._players = [
            EnvSlot(env, seed, first + place, self._limit) for place, env in enumerate(envs)
        ]
        self._rows = []

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        agent = agents[AGENT]
        table = StepTable(self.agents[AGENT], steps, len(self._players))
        acted: list[Tensor] = []
        distributions: list[ActionDistribution] = []
        states: list[Tensor] = []
        try:
            self._begin(agent)
            self.carried = [len(player.actions) for player in self._players]
            with seeded(derived_seed(self._seed, iteration)), torch.no_grad():
                for step in range(steps):
                    self.deadline.again()
                    write_rows(table.seen, step, self._rows)
                    table.begins[step] = self._begins
                    if self._state is not None:
                        states.append(self._state)
                    now = {n: torch.from_numpy(b[step]) for n, b in table.seen.items()}
                    now = {n: seen.to(agent.device) for n, seen in now.items()}
                    made, self._state = agent.act(now, self._state)
                    distributions.append(made[ACTION])
                    acted.append(sampled(made, self.greedy)[ACTION])
                    chosen = acted[-1].tolist()
                    for place, player in enumerate(self._players):
                        self._step(table, step, place, player, chosen[place])
        except BaseException as error:  # whatever an environment raises
            raise raised(self.env.name, self.where(), error) from error
        self._acting = None
        self.finished = table.finished
        actions = torch.stack(acted, 1)
        with torch.no_grad():  # for all steps at once: it costs as much as for one
            logprobs = distributions[0].stacked(distributions).log_prob(actions)
        acts: dict[str, Any] = {"actions": {ACTION: actions.cpu()}, "logprobs": logprobs.cpu()}
        if states:
            acts["state"] = torch.stack(states, 1).cpu()
            acts["begins"] = torch.from_numpy(table.begins.T.copy())
        return table.batch(self.env.name, acts, self._players[0].place)

    def _step(self, table: StepTable, step: int, place: int, player: EnvSlot, action: Any) -> None:
        self._acting = player
        row, reward, over, cut = player.step(action)
        ended = player.over(over) if over or cut else None
        table.note(step, place, reward, row, ended)
        self._begins[place] = over or cut
        if over or cut:
            row = player.begin(player.episode + 1)
            if self._state is not None:
                self._state[place] = 0
        self._rows[place] = row

    def _begin(self, agent: Any) -> None:
        if self._loaded is not None:
            self._go_on(self._loaded)
            self._loaded = None
        if not self._rows:
            self._rows = [self._reset(player) for player in self._players]
            self._begins = [True] * len(self._players)
            self._state = agent.begin(len(self._players)) if agent.state_size else None

    def _reset(self, player: EnvSlot) -> Any:
        """What a player sees at the begin of its first episode."""
        self.deadline.again()
        self._acting = player
        return player.begin(0)

    def where(self) -> str:
        return "" if self._acting is None else self._acting.where()

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
            rows = [self._reset(player) for player in players]
            state = agent.begin(len(players)) if agent.state_size else None
            playing = list(range(len(players)))
            with seeded(seeds[0]), torch.no_grad():
                while playing:
                    self.deadline.again()
                    seen = {n: buffer_of(o, 1, len(playing)) for n, o in space.observations.items()}
                    write_rows(seen, 0, [rows[place] for place in playing])
                    observed = {n: torch.from_numpy(b[0]) for n, b in seen.items()}
                    require_finite_values(
                        self.env.name, {n: o.unsqueeze(1) for n, o in observed.items()}
                    )
                    made, state = agent.act({n: o.to(device) for n, o in observed.items()}, state)
                    chosen = sampled(made, greedy)[ACTION].tolist()
                    for place, action in zip(playing, chosen, strict=True):
                        self._acting = players[place]
                        if render:
                            pictures[place].append(picture_of(players[place].env, self.env.name))
                        rows[place], _, over, cut = players[place].step(action)
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

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        return {
            "episodes": [
                {"episode": p.episode, "actions": list(p.actions), "seen": tensors_of(row)}
                for p, row in zip(self._players, self._rows, strict=False)  # none yet: no rows
            ],
            "state": None if self._state is None else self._state.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def _go_on(self, state: dict[str, Any]) -> None:
        """Do again what was done in the episodes at hand."""
        if len(state["episodes"]) != len(self._players):
            return  # another number of environments: new episodes
        self._rows, self._begins = [], []
        for player, known in zip(self._players, state["episodes"], strict=True):
            self.deadline.again()
            self._acting = player
            row, ended = player.again(known["episode"], known["actions"])
            if ended or not same_tensors(tensors_of(row), known["seen"]):
                raise EnvError(f"{self.env.name}: {self.where()}, {self.NOT_THERE}")
            self._rows.append(row)
            self._begins.append(not known["actions"])
        self._state = state["state"]

    def close(self) -> None:
        players, self._players = self._players, []
        close(self.env.name, (player.env for player in players))

    def abandon(self) -> None:
        self._players = []


collector_of.register(Gym, GymCollector)
