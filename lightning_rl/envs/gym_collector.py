"""GymCollector: steps gymnasium environments one by one, and the policy for all of them at once."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
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
    require_finite_values,
    seeded,
)
from lightning_rl.envs.gym import ACTION, Gym, space_of
from lightning_rl.envs.gym_player import (
    Player,
    buffer_of,
    picture_of,
    same_tensors,
    tensors_of,
    write_rows,
)
from lightning_rl.envs.maker import AGENT
from lightning_rl.errors import require_at_least
from lightning_rl.networks.actor_critic import sampled
from lightning_rl.networks.distributions import ActionDistribution
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

    def __init__(self, env: Gym, max_episode_length: int | None, max_step_seconds: float) -> None:
        require_at_least(1, max_episode_length=max_episode_length)
        self.env = env
        self._limit = max_episode_length
        self._deadline = Deadline(max_step_seconds, env.name)
        self._players: list[Player] = []
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
        self._players = [
            Player(self.env.made(), seed, first + place, self._limit)
            for place in range(num_envs or 1)
        ]
        self.agents = {AGENT: space_of(self._players[0].env)}
        self._rows = []

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        agent, space = agents[AGENT], self.agents[AGENT]
        count = len(self._players)
        self._begin(agent)
        seen = {n: buffer_of(o, steps + 1, count) for n, o in space.observations.items()}
        rewards = np.zeros((steps, count), np.float32)
        done, terminated = np.zeros((2, steps, count), bool)
        begins = np.zeros((steps, count), bool)
        acted: list[Tensor] = []
        distributions: list[ActionDistribution] = []
        states: list[Tensor] = []
        ends: list[tuple[int, Any]] = []
        finished = []
        write_rows(seen, 0, self._rows)
        step = place = 0
        device = agent.device
        try:
            with seeded(derived_seed(self._seed, iteration)), torch.no_grad(), self._deadline():
                for step in range(steps):
                    self._deadline.again()
                    begins[step] = self._begins
                    if self._state is not None:
                        states.append(self._state)
                    observed = {n: torch.from_numpy(b[step]).to(device) for n, b in seen.items()}
                    made, self._state = agent.act(observed, self._state)
                    distributions.append(made[ACTION])
                    acted.append(made[ACTION].sample())
                    chosen = acted[-1].tolist()
                    for place, player in enumerate(self._players):
                        row, reward, over, cut = player.step(chosen[place])
                        rewards[step, place] = reward
                        self._begins[place] = over or cut
                        if over or cut:
                            done[step, place], terminated[step, place] = True, over
                            if not over:
                                # A copy: an environment may write the next one over it.
                                ends.append((place * steps + step, deepcopy(row)))
                            finished.append(player.over(over))
                            row = player.begin(player.episode + 1)
                            if self._state is not None:
                                self._state[place] = 0
                        self._rows[place] = row
                    write_rows(seen, step + 1, self._rows)
        except EnvError as error:
            raise EnvError(f"{error} ({self._where(place)})") from error
        except Exception as error:  # whatever an environment raises
            what = f"{type(error).__name__}: {error}"
            raise EnvError(f"{self.env.name}: {self._where(place)} raised {what}") from error
        ends += [
            (e * steps + steps - 1, row) for e, row in enumerate(self._rows) if not done[-1, e]
        ]
        self.finished = finished
        actions = torch.stack(acted, 1)
        with torch.no_grad():  # for all steps at once: it costs as much as for one
            logprobs = distributions[0].stacked(distributions).log_prob(actions)
        acts = {"actions": {ACTION: actions.cpu()}, "logprobs": logprobs.cpu()}
        batch = self._batch(seen, acts, rewards, done, terminated, ends)
        if states:
            batch["steps", AGENT, "state"] = torch.stack(states, 1).cpu()
            batch["steps", AGENT, "begins"] = torch.from_numpy(begins.T.copy())
        return batch

    def _begin(self, agent: Any) -> None:
        if self._loaded is not None:
            self._go_on(self._loaded)
            self._loaded = None
        if not self._rows:
            self._rows = [player.begin(0) for player in self._players]
            self._begins = [True] * len(self._players)
            self._state = agent.begin(len(self._players)) if agent.state_size else None

    def _batch(
        self,
        seen: Mapping[str, np.ndarray],
        acts: Mapping[str, Any],
        rewards: np.ndarray,
        done: np.ndarray,
        terminated: np.ndarray,
        ends: Sequence[tuple[int, Any]],
    ) -> TensorDict:
        steps, count = rewards.shape
        observations = {n: torch.from_numpy(b[:-1]).transpose(0, 1) for n, b in seen.items()}
        own: dict[str, Any] = {
            **acts,
            "observations": observations,
            "rewards": torch.from_numpy(rewards.T),
        }
        require_finite_values(self.env.name, observations | {"reward": own["rewards"]})
        last = {n: buffer_of(o, len(ends)) for n, o in self.agents[AGENT].observations.items()}
        for place, (_, row) in enumerate(ends):
            write_rows(last, place, row)
        followed = {n: torch.from_numpy(b) for n, b in last.items()}
        flags = {"done": torch.from_numpy(done.T), "terminated": torch.from_numpy(terminated.T)}
        return TensorDict(
            {
                "steps": TensorDict(flags | {AGENT: own}, [count, steps]),
                "ends": TensorDict(
                    {
                        "place": torch.tensor([place for place, _ in ends], dtype=torch.long),
                        AGENT: {"observations": followed},
                    },
                    [len(ends)],
                ),
            },
            [],
        )

    def _where(self, place: int) -> str:
        player = self._players[place]
        return (
            f"environment {player.place} in step {len(player.actions)} of its episode "
            f"{player.episode}, of seed {player.seed}"
        )

    # ---------------------------------------------------------------- episodes apart

    def play(
        self, agents: Agents, seeds: Sequence[int], greedy: bool, render: bool = False
    ) -> list[EnvEpisode]:
        agent, space = agents[AGENT], self.agents[AGENT]
        device = agent.device
        options = {"render_mode": "rgb_array"} if render else {}
        players = [Player(self.env.made(**options), seed, 0, self._limit) for seed in seeds]
        episodes: dict[int, EnvEpisode] = {}
        pictures: list[list[Any]] = [[] for _ in seeds]
        rows = [player.begin(0) for player in players]
        state = agent.begin(len(players)) if agent.state_size else None
        playing = list(range(len(players)))
        try:
            with seeded(seeds[0]), torch.no_grad(), self._deadline():
                while playing:
                    self._deadline.again()
                    seen = {n: buffer_of(o, 1, len(playing)) for n, o in space.observations.items()}
                    write_rows(seen, 0, [rows[place] for place in playing])
                    observed = {n: torch.from_numpy(b[0]).to(device) for n, b in seen.items()}
                    made, state = agent.act(observed, state)
                    chosen = sampled(made, greedy)[ACTION].tolist()
                    for place, action in zip(playing, chosen, strict=True):
                        if render:
                            pictures[place].append(picture_of(players[place].env, self.env.name))
                        rows[place], _, over, cut = players[place].step(action)
                        if over or cut:
                            episodes[place] = players[place].over(over)
                    left = [i for i, place in enumerate(playing) if place not in episodes]
                    playing = [playing[i] for i in left]
                    state = None if state is None else state[left]
        finally:
            for player in players:
                player.env.close()
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
            "state": self._state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def _go_on(self, state: dict[str, Any]) -> None:
        """Do again what was done in the episodes at hand."""
        if len(state["episodes"]) != len(self._players):
            return  # another number of environments: new episodes
        self._rows, self._begins = [], []
        for player, known in zip(self._players, state["episodes"], strict=True):
            row, over, cut = player.begin(known["episode"]), False, False
            for action in known["actions"]:
                row, _, over, cut = player.step(action)
                if over or cut:
                    break
            if over or cut or not same_tensors(tensors_of(row), known["seen"]):
                where = self._where(player.place - self._players[0].place)
                raise EnvError(
                    f"{self.env.name}: {where}, is not where it was when the checkpoint was saved: "
                    "it does not play the same from the same seed, so the run cannot be gone on "
                    "with as it was"
                )
            self._rows.append(row)
            self._begins.append(not known["actions"])
        self._state = state["state"]

    def close(self) -> None:
        for player in self._players:
            player.env.close()
        self._players = []


collector_of.register(Gym, GymCollector)
