"""EnvSlot: one gymnasium environment and its episodes; helpers for rows of observations."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.envs.collector import EnvEpisode, EnvError
from lightning_rl.envs.gym import OBSERVATION
from lightning_rl.envs.gym_validation import form_of, shown
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.space import Observed
from lightning_rl.errors import ConfigError
from lightning_rl.run.loop.stacks import name_crashes
from lightning_rl.run.seeding import derived_seed

_log = logging.getLogger(__name__)


def episode_seed(seed: int, place: int, episode: int) -> int:
    """Return the seed of an environment's reset; every episode of every environment has its own."""
    return derived_seed(seed, place, episode) % 2**31


class EnvAnswer(NamedTuple):
    """An environment's answer to a request.

    Args:
        row: the observation after it.
        reward: reward of the step.
        episode: the episode that ended with it, if one did.
        begin: the first observation of the next episode, if one ended.
    """

    row: Any
    reward: float = 0.0
    episode: EnvEpisode | None = None
    begin: Any = None


class EnvSeat:
    """An environment's index, its current episode, and the actions taken in it.

    Args:
        seed: seed of the run.
        place: index among the environments of all ranks; each episode of each has its own seed.
    """

    def __init__(self, seed: int, place: int) -> None:
        self.place = place
        self.episode = -1
        self.actions: list[Any] = []
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed of the present episode."""
        return episode_seed(self._seed, self.place, self.episode)

    def where(self) -> str:
        """Describe the environment, and the step and episode it is in, for messages."""
        return (
            f"environment {self.place} in step {len(self.actions)} of its episode {self.episode}, "
            f"seed {self.seed}"
        )


class EnvSlot(EnvSeat):
    """A seat with its environment.

    Args:
        env: a ``gymnasium.Env``.
        seed: seed of the run.
        place: index among the environments of all ranks.
        limit: steps after which an episode is truncated; None: the environment's own limit.
    """

    def __init__(self, env: Any, seed: int, place: int, limit: int | None) -> None:
        super().__init__(seed, place)
        name_crashes()  # of the environment
        self.env = env
        self.reward = 0.0
        self._limit = limit
        action = env.action_space
        self._start = int(getattr(action, "start", 0)) if action.shape == () else 0
        box = hasattr(action, "low")
        self._bounds = (action.low, action.high) if box else None
        self.seen = form_of(env.observation_space)

    def begin(self, episode: int) -> EnvAnswer:
        """Reset to the beginning of an episode."""
        self.episode, self.actions, self.reward = episode, [], 0.0
        answer = self.env.reset(seed=self.seed)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise EnvError(
                f"reset returned {shown(answer)}; gymnasium requires (observation, info)"
            )
        return EnvAnswer(self.seen(answer[0]))

    def again(self, episode: int, actions: Sequence[Any]) -> EnvAnswer:
        """Replay the actions of an episode that has not ended with them."""
        row = self.begin(episode).row
        for action in actions:
            row, reward, over, cut = self.step(action)
            if over or cut:
                return EnvAnswer(row, reward, self.over(over))
        return EnvAnswer(row)

    def act(self, action: Any) -> EnvAnswer:
        """Take a step; if the episode ends with it, begin the next one."""
        row, reward, over, cut = self.step(action)
        if not (over or cut):
            return EnvAnswer(row, reward)
        # A copy: an environment may write the next observation over it.
        return EnvAnswer(deepcopy(row), reward, self.over(over), self.begin(self.episode + 1).row)

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Take a step: return the observation, the reward, and whether it terminated or was
        truncated.
        """
        self.actions.append(action)
        if self._bounds is not None:
            action = np.clip(np.asarray(action, np.float32), *self._bounds)
        elif self._start:
            action = action + self._start
        answer = self.env.step(action)
        try:
            observed, reward, terminated, truncated, _ = answer
        except (TypeError, ValueError):
            raise EnvError(
                f"step returned {shown(answer)}; gymnasium requires (observation, reward, "
                "terminated, truncated, info)"
            ) from None
        try:
            reward = float(reward)
        except (OverflowError, TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise EnvError(f"step gave {shown(answer[1])} as reward, which is not a finite number")
        self.reward += reward
        over, cut = _flag("terminated", terminated), _flag("truncated", truncated)
        return self.seen(observed), reward, over, cut or len(self.actions) == self._limit

    def over(self, terminated: bool) -> EnvEpisode:
        """Return the record of the finished episode."""
        return EnvEpisode({AGENT: self.reward}, len(self.actions), self.seed, terminated)


def _flag(name: str, value: Any) -> bool:
    """Return whether an episode terminated or was truncated.

    Raises:
        EnvError: if the value is not a truth value: None would never end an episode.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer) or (
        isinstance(value, np.ndarray) and value.size == 1
    ):
        return bool(value)
    raise EnvError(f"step gave {shown(value)} as {name}, which is neither True nor False")


def close(name: str, envs: Iterable[Any]) -> None:
    """Close environments; warn about one that cannot be closed, which does no harm by then."""
    for env in envs:
        try:
            env.close()
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            _log.warning("%s: close raised %s; the environment was not closed", name, what)


def picture_of(env: Any, name: str) -> np.ndarray:
    """Render a picture (H, W, 3) of bytes.

    Raises:
        ConfigError: if it renders none.
    """
    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise ConfigError(
            f"data.env: {name} renders no rgb_array picture, but {type(picture).__name__}; "
            "remove EpisodePreview"
        )
    return picture


def tensors_of(row: Any) -> dict[str, Tensor]:
    """Convert an observation to tensors by name, as a checkpoint stores it."""
    parts = row if isinstance(row, Mapping) else {OBSERVATION: row}
    return {name: torch.as_tensor(np.asarray(part)) for name, part in parts.items()}


def buffer_of(observed: Observed, *leading: int) -> np.ndarray:
    """Allocate a buffer for observations, (*leading, *shape)."""
    kind = np.uint8 if observed.dtype == torch.uint8 else np.float32
    return np.zeros((*leading, *observed.shape), kind)


def write_rows(buffers: Mapping[str, np.ndarray], place: Any, rows: Any) -> None:
    """Write one observation to an index of the buffers, or a list of them to as many indices."""
    if OBSERVATION in buffers and len(buffers) == 1:
        buffers[OBSERVATION][place] = rows
        return
    for name, buffer in buffers.items():
        buffer[place] = [row[name] for row in rows] if isinstance(rows, list) else rows[name]
