"""StepTable: steps of gymnasium environments, as a batch to learn from."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.collector import EnvEpisode, require_finite_values
from lightning_rl.envs.gym import ACTION
from lightning_rl.envs.gym_player import buffer_of, write_rows
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.networks.space import Space


class StepTable:
    """T steps of E environments, filled in any order.

    Args:
        space: observations and actions of the agent.
        steps: T.
        count: E.
    """

    def __init__(self, space: Space, steps: int, count: int) -> None:
        self.space = space
        self.steps = steps
        self.count = count
        # By time first: what all environments show in a step is one piece of memory.
        self.seen = {n: buffer_of(o, steps, count) for n, o in space.observations.items()}
        self.finished: list[EnvEpisode] = []
        self._rewards = np.zeros((steps, count), np.float32)
        self._done, self._terminated = np.zeros((2, steps, count), bool)
        self._begins = np.zeros((steps, count), bool)
        self._ends: list[tuple[int, Any]] = []
        self._order: list[np.ndarray] = []
        self._first = np.arange(count) * steps
        self._made: list[ActionDistribution] = []
        self._actions: list[Tensor] = []
        self._states: list[Tensor] = []

    def see(
        self, steps: Sequence[int], places: Sequence[int], rows: list[Any], begins: Sequence[bool]
    ) -> dict[str, Tensor]:
        """Record what some environments show before a step; return it by name."""
        if steps.count(steps[0]) == self.count:  # all at once: there is a view of that
            where: Any = steps[0]
            self._order.append(self._first + steps[0])
        else:
            where = np.array(steps), np.array(places)
            self._order.append(where[1] * self.steps + where[0])
        write_rows(self.seen, where, rows)
        self._begins[where] = begins
        return {n: torch.from_numpy(buffer[where]) for n, buffer in self.seen.items()}

    def act(self, made: ActionDistribution, action: Tensor, state: Tensor | None) -> None:
        """Record the actions of the environments seen last, and their memory before."""
        self._made.append(made)
        self._actions.append(action)
        if state is not None:
            self._states.append(state)

    def note(self, step: int, place: int, reward: float, row: Any, over: EnvEpisode | None) -> None:
        """Record an environment's answer to a step; ``over``: the episode that ended with it."""
        self._rewards[step, place] = reward
        if over is not None:
            self._done[step, place], self._terminated[step, place] = True, over.terminated
            self.finished.append(over)
        if over is not None or step == self.steps - 1:
            # A copy: an environment may write the next observation over it.
            self._ends.append((place * self.steps + step, deepcopy(row)))

    def batch(self, name: str, first: int) -> TensorDict:
        """Return the whole batch as ``EnvCollector`` describes it.

        Raises:
            EnvError: if a value is NaN or infinite; ``name`` is the environment's, and ``first``
                the index of the first one.
        """
        observations = {n: torch.from_numpy(b).transpose(0, 1) for n, b in self.seen.items()}
        rewards = torch.from_numpy(self._rewards.T)
        require_finite_values(name, observations | {"reward": rewards}, first)
        own: dict[str, Any] = {**self._acts(), "observations": observations, "rewards": rewards}
        flags = {
            "done": torch.from_numpy(self._done.T),
            "terminated": torch.from_numpy(self._terminated.T),
        }
        shape = [self.count, self.steps]
        return TensorDict(
            {"steps": TensorDict(flags | {AGENT: own}, shape), "ends": self._followed()}, []
        )

    def _acts(self) -> dict[str, Any]:
        """Return the agent's part, (E, T, ...)."""
        order = torch.from_numpy(np.concatenate(self._order).argsort())

        def by_place(values: Tensor) -> Tensor:
            return values.cpu().unflatten(0, (self.count, self.steps))

        actions = torch.cat(self._actions)[order]
        with torch.no_grad():  # for all steps at once: it costs as much as for one
            logprobs = self._made[0].joined(self._made).at(order).log_prob(actions)
        acts = {"actions": {ACTION: by_place(actions)}, "logprobs": by_place(logprobs)}
        if not self._states:
            return acts
        states = by_place(torch.cat(self._states)[order])
        return acts | {"state": states, "begins": torch.from_numpy(self._begins.T.copy())}

    def _followed(self) -> TensorDict:
        """Return the observations after steps that no step follows, by place."""
        ends: Sequence[tuple[int, Any]] = sorted(self._ends, key=lambda end: end[0])
        last = {n: buffer_of(o, len(ends)) for n, o in self.space.observations.items()}
        for row, (_, seen) in enumerate(ends):
            write_rows(last, row, seen)
        followed = {n: torch.from_numpy(buffer) for n, buffer in last.items()}
        places = torch.tensor([place for place, _ in ends], dtype=torch.long)
        return TensorDict({"place": places, AGENT: {"observations": followed}}, [len(ends)])
