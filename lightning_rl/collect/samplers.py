"""Samplers choose which older groups join the fresh ones in a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_rl.config.arguments import configurable
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.errors import ConfigError, DataError, require_at_least, require_finite
from lightning_rl.rollout import Group


@dataclass(frozen=True)
class BufferEntry:
    """A group in the buffer, with the statistics that samplers need.

    ``oldest`` is the version of its oldest token, ``reward`` the mean r̄ of its G rewards and
    ``spread`` their mean absolute deviation, sum |r - r̄| / G: the mean |advantage| of GRPO before
    its division by the standard deviation.
    """

    place: int
    oldest: int
    reward: float
    spread: float


@configurable
class Sampler(ABC):
    """Chooses groups to replay. Whatever it remembers must be in its state, for an exact resume.

    Args:
        groups: maximum number of groups to add to the fresh ones of an iteration.
    """

    def __init__(self, groups: int = 8) -> None:
        require_at_least(0, groups=groups)
        self.groups = groups

    @property
    def gives_demonstrations(self) -> bool:
        """True if :meth:`demonstrations` returns groups to imitate, which needs ``SFTMix``."""
        return False

    def count(self, fresh: int) -> int:
        """Return the number of groups to replay with so many fresh ones."""
        return self.groups

    @abstractmethod
    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        """Return at most ``count`` different entries; all given ones are older than the fresh
        groups.
        """

    def demonstrations(self, fresh: int, random: np.random.Generator) -> list[Group]:
        """Return groups from another source, to be imitated."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last choice, which are recorded as ``sample/<name>``.

        Return the same keys in every iteration, even if there was nothing to choose from.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken."""


@configurable
class FIFO(Sampler):
    """Replays each group once, first in, first out: the oldest one not replayed yet."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__(groups)
        self._last = 0

    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        chosen = [entry for entry in entries if entry.place > self._last][:count]
        if chosen:
            self._last = chosen[-1].place
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]


class _Weighted(Sampler):
    """Draws without replacement; the first draw has probabilities w / sum w, and so on."""

    @abstractmethod
    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        """Return log w of each entry, of shape (entries,); -inf for entries never to be drawn."""

    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        if not entries or count == 0:
            return []
        log_weights = self.log_weights(entries)
        # The largest of log w + Gumbel noise are such a draw (Kool et al. 2019).
        keys = log_weights + random.gumbel(size=len(entries))
        drawn = np.argsort(-keys, kind="stable")[:count]
        return [entries[i] for i in sorted(drawn) if log_weights[i] > -np.inf]


class Uniform(_Weighted):
    """Draws every group of the buffer with equal probability."""

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        return np.zeros(len(entries))


@configurable
class RewardPriority(_Weighted):
    """Prefers groups with a high mean reward r̄: w = exp(r̄ / temperature).

    Args:
        groups: see :class:`Sampler`.
        temperature: in units of reward; the smaller, the stronger the preference.
    """

    def __init__(self, groups: int = 8, temperature: float = 0.25) -> None:
        super().__init__(groups)
        require_finite(temperature=temperature)
        if temperature <= 0:
            raise ConfigError(
                f"RewardPriority(temperature={temperature}) must be > 0; the default is 0.25"
            )
        self.temperature = temperature

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        return np.array([entry.reward for entry in entries]) / self.temperature


@configurable
class AdvantagePriority(_Weighted):
    """Prefers groups with large advantages: w = spread ^ alpha (Schaul et al. 2016, with |A| as p).

    ``spread`` is the mean |r - r̄| of the group. Groups without spread are never drawn.

    Args:
        groups: see :class:`Sampler`.
        alpha: exponent of the spread; 0 draws all groups with a spread with equal probability, 1
            in proportion to it.
    """

    def __init__(self, groups: int = 8, alpha: float = 1.0) -> None:
        super().__init__(groups)
        require_at_least(0, alpha=alpha)
        require_finite(alpha=alpha)
        self.alpha = alpha

    def log_weights(self, entries: Sequence[BufferEntry]) -> np.ndarray:
        spread = np.array([entry.spread for entry in entries])
        positive = spread > 0
        logs = np.log(spread, where=positive, out=np.zeros_like(spread))
        return np.where(positive, self.alpha * logs, -np.inf)


@configurable
class Mixed(Sampler):
    """Mixes fresh groups, replayed ones and demonstrations in given shares of the batch.

    All F fresh groups are trained on, together with F * replayed / fresh replayed groups and F *
    demonstration / fresh demonstrations, rounded, where fresh = 1 - replayed - demonstration.

    Args:
        replayed: share of replayed groups, which ``pick`` chooses.
        demonstration: share of rollouts to imitate, each a group of its own; needs ``SFTMix``.
        demonstration_path: a rollout file; its completed rollouts with a reward of at least
            ``demonstration_reward`` are demonstrations.
        demonstration_reward: minimum reward of a demonstration; None: all graded rollouts.
        pick: chooses the groups to replay; None: ``Uniform``.

    Raises:
        ConfigError: for shares that leave no room for fresh groups, or ``demonstration`` without a
            file.
    """

    def __init__(
        self,
        replayed: float = 0.25,
        demonstration: float = 0.0,
        demonstration_path: str | None = None,
        demonstration_reward: float | None = None,
        pick: Sampler | None = None,
    ) -> None:
        super().__init__()
        require_finite(
            replayed=replayed,
            demonstration=demonstration,
            demonstration_reward=demonstration_reward,
        )
        if min(replayed, demonstration) < 0 or replayed + demonstration >= 1:
            raise ConfigError(
                f"Mixed(replayed={replayed}, demonstration={demonstration}): shares must be >= 0 "
                "and sum to less than 1; the rest are fresh groups"
            )
        if (demonstration > 0) != (demonstration_path is not None):
            raise ConfigError(
                f"Mixed(demonstration={demonstration}, demonstration_path={demonstration_path!r}): "
                "set both, or neither"
            )
        self.replayed = replayed
        self.demonstration = demonstration
        self.demonstration_path = demonstration_path
        self.demonstration_reward = demonstration_reward
        self.pick = pick or Uniform()

    @property
    def gives_demonstrations(self) -> bool:
        return self.demonstration > 0

    def count(self, fresh: int) -> int:
        return round(fresh * self.replayed / (1 - self.replayed - self.demonstration))

    def choose(
        self, entries: Sequence[BufferEntry], count: int, random: np.random.Generator
    ) -> list[BufferEntry]:
        return self.pick.choose(entries, count, random)

    def demonstrations(self, fresh: int, random: np.random.Generator) -> list[Group]:
        count = round(fresh * self.demonstration / (1 - self.replayed - self.demonstration))
        if count == 0:
            return []
        known = self._known
        drawn = random.choice(len(known), size=min(count, len(known)), replace=False)
        return [known[i] for i in sorted(drawn)]

    def metrics(self) -> dict[str, float]:
        return self.pick.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.pick.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pick.load_state_dict(state)

    @cached_property
    def _known(self) -> list[Group]:
        assert self.demonstration_path is not None
        return _read_demonstrations(self.demonstration_path, self.demonstration_reward)


def _read_demonstrations(path: str, least: float | None) -> list[Group]:
    """Read them as groups of one, whose advantage is zero; their tokens get version -1."""
    demonstrations: list[Group] = []
    for recorded in open_rollouts(path).read():
        rollout = recorded.rollout
        if not rollout.completed or rollout.reward is None:
            continue
        if least is not None and rollout.reward < least:
            continue
        rollout.group_id = f"demonstration/{len(demonstrations)}"
        rollout.demonstration = True
        for row in rollout.rows:
            row.versions[:] = [-1] * len(row.versions)
        demonstrations.append([rollout])
    if not demonstrations:
        raise DataError(
            f"{path}: no completed rollout has a reward of at least {least}; lower "
            "demonstration_reward"
        )
    return demonstrations
