"""Player: one gymnasium environment and its episodes; and rows of what is seen."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.envs.collector import EnvEpisode
from lightning_rl.envs.gym import OBSERVATION
from lightning_rl.envs.maker import AGENT
from lightning_rl.errors import ConfigError
from lightning_rl.networks.space import Observed
from lightning_rl.run.seeding import derived_seed


def episode_seed(seed: int, place: int, episode: int) -> int:
    """The seed that an environment is reset with; each episode of each has one of its own."""
    return derived_seed(seed, place, episode) % 2**31


class Player:
    """One environment, the episode that it is in, and what was done in it.

    Args:
        env: a ``gymnasium.Env``.
        seed: of the run.
        place: among the environments of all ranks; each episode of each has a seed of its own.
        limit: steps after which an episode is cut; None: as the environment has it.
    """

    def __init__(self, env: Any, seed: int, place: int, limit: int | None) -> None:
        self.env = env
        self.place = place
        self.episode = -1
        self.actions: list[Any] = []
        self.reward = 0.0
        self._seed = seed
        self._limit = limit
        action = env.action_space
        self._start = int(getattr(action, "start", 0)) if action.shape == () else 0
        box = hasattr(action, "low")
        self._bounds = (action.low, action.high) if box else None
        seen = env.observation_space
        self._one_hot = int(seen.n) if hasattr(seen, "n") and seen.shape == () else 0

    @property
    def seed(self) -> int:
        """Of the present episode."""
        return episode_seed(self._seed, self.place, self.episode)

    def begin(self, episode: int) -> Any:
        """Reset to the begin of an episode; returns what is seen."""
        self.episode, self.actions, self.reward = episode, [], 0.0
        return self.seen(self.env.reset(seed=self.seed)[0])

    def again(self, episode: int, actions: Sequence[Any]) -> tuple[Any, bool]:
        """Do again what was done in an episode; what is seen then, and whether it has ended."""
        row, ended = self.begin(episode), False
        for action in actions:
            row, _, over, cut = self.step(action)
            if over or cut:
                ended = True
                break
        return row, ended

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """What is seen then, the reward, and whether the episode is over, or was cut."""
        self.actions.append(action)
        if self._bounds is not None:
            action = np.clip(np.asarray(action, np.float32), *self._bounds)
        elif self._start:
            action = action + self._start
        observed, reward, terminated, truncated, _ = self.env.step(action)
        reward = float(reward)
        self.reward += reward
        truncated = truncated or len(self.actions) == self._limit
        return self.seen(observed), reward, bool(terminated), bool(truncated)

    def seen(self, observed: Any) -> Any:
        """An observation as agents get it: a number of n as a row of n."""
        if not self._one_hot:
            return observed
        row = np.zeros(self._one_hot, np.float32)
        row[int(observed) - int(self.env.observation_space.start)] = 1
        return row

    def over(self, terminated: bool) -> EnvEpisode:
        """What is to be told of the episode."""
        return EnvEpisode({AGENT: self.reward}, len(self.actions), self.seed, terminated)


def picture_of(env: Any, name: str) -> np.ndarray:
    """A picture (H, W, 3) of bytes.

    Raises:
        ConfigError: if it gives none.
    """
    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise ConfigError(
            f"data.env: {name} renders no picture as rgb_array, but {type(picture).__name__}; "
            "leave EpisodePreview out"
        )
    return picture


def tensors_of(row: Any) -> dict[str, Tensor]:
    """An observation, by name, as a checkpoint keeps it."""
    parts = row if isinstance(row, Mapping) else {OBSERVATION: row}
    return {name: torch.as_tensor(np.asarray(part)) for name, part in parts.items()}


def same_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Tell whether two observations are the same."""
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def buffer_of(observed: Observed, *leading: int) -> np.ndarray:
    """Room for observations, (*leading, *shape)."""
    kind = np.uint8 if observed.dtype == torch.uint8 else np.float32
    return np.zeros((*leading, *observed.shape), kind)


def write_rows(buffers: Mapping[str, np.ndarray], place: int, rows: Any) -> None:
    """Write one observation, or one of each environment, to a place of the buffers."""
    if OBSERVATION in buffers and len(buffers) == 1:
        buffers[OBSERVATION][place] = rows
        return
    for name, buffer in buffers.items():
        buffer[place] = [row[name] for row in rows] if isinstance(rows, list) else rows[name]
