"""Transitions: single steps with the observations after them, and their replay buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.batches import EpisodeSource, steps_of
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.processes import dist


@dataclass(frozen=True)
class Transitions:
    """Steps of one agent: M of them, (M, *A, ...) each.

    Args:
        observations: observations before the step, by name.
        action: the action taken.
        rewards: (M, *A).
        following: observations after the step, by name.
        terminated: (M, *A), True if the episode ended by itself: nothing follows.
    """

    observations: Mapping[str, Tensor]
    action: Tensor
    rewards: Tensor
    following: Mapping[str, Tensor]
    terminated: Tensor

    @classmethod
    def of(cls, rows: TensorDict, agent: str, action: str) -> "Transitions":
        """Extract an agent's transitions from rows of :func:`transitions_of`, for one action."""
        own = rows[agent]
        rewards, terminated = own["rewards"], rows["terminated"]
        return cls(
            dict(own["observations"].items()),
            own["actions", action],
            rewards,
            dict(own["following"].items()),
            terminated.reshape(-1, *[1] * (rewards.ndim - 1)).expand_as(rewards),
        )


def transitions_of(batch: TensorDict, agents: Mapping[str, EpisodeSource]) -> TensorDict:
    """Flatten a batch to single steps, [T * E], ordered by time.

    ``terminated`` (N,), and per agent, under its name, ``observations`` and ``following`` by name,
    ``actions`` by name, and ``rewards`` (N, *A). ``following`` after termination is never used.
    ``skipped`` steps are left out.
    """
    steps = steps_of(batch, agents)
    kept = ("observations", "following", "actions", "rewards")
    rows = {"terminated": steps["terminated"]}
    rows |= {name: steps[name].select(*kept) for name in agents}
    in_time = TensorDict(rows, steps.batch_size).transpose(0, 1).flatten(0, 1)
    return in_time[~steps["skipped"].T.flatten()] if "skipped" in steps else in_time


@configurable
class TransitionBuffer:
    """The last steps of a run, for experience replay (Lin 1992).

    It lies in main memory, and in every checkpoint, so that a resumed run is bit-equal to an
    uninterrupted one. A step holds observations before and after it, action, reward and a flag: 33
    bytes for Pendulum (3.3 MB with ``capacity=100_000``), 56 KB for pictures of 84 x 84 x 4 bytes
    (5.6 GB). Each rank keeps ``capacity`` steps of its own environments; if a run is resumed on
    other, or more, ranks, they share them.

    Args:
        capacity: number of steps; the oldest are replaced by new ones.

    Raises:
        ConfigError: for a ``capacity`` below 1.
    """

    # The state of torchrl's ReplayBuffer is no copy, and always of its whole capacity: 3.2 MB after
    # two steps of 32 bytes. It also broadcasts rows of another shape.

    def __init__(self, capacity: int = 100_000) -> None:
        require_at_least(1, capacity=capacity)
        self.capacity = capacity
        self.added = 0
        """Steps added since the run began, including those replaced."""
        self._rows: TensorDict | None = None

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of a full buffer; 0 until something is added."""
        rows = self._rows
        return 0 if rows is None else sum(t.nbytes for t in rows.values(True, True))

    def add(self, rows: TensorDict) -> None:
        """Add rows [N], such as those of :func:`transitions_of`, the oldest first.

        Raises:
            ConfigError: if they differ in kind from earlier ones.
        """
        if not len(rows):
            return
        count = len(rows)
        rows = rows[-self.capacity :].cpu()
        if self._rows is None:
            self._rows = rows.apply(self._empty, batch_size=[self.capacity])
        _require_alike(self._rows, rows)
        self.added += count
        self._rows[torch.arange(self.added - len(rows), self.added) % self.capacity] = rows

    def _empty(self, like: Tensor) -> Tensor:
        # Memory that is all 0 is taken when it is written to, not before.
        return like.new_zeros((self.capacity, *like.shape[1:]))

    def sample(self, count: int, generator: torch.Generator | None = None) -> TensorDict:
        """Sample rows [count], with replacement; None: with torch's global generator.

        Raises:
            ConfigError: if there are none.
        """
        if self._rows is None:
            raise ConfigError("the buffer is empty; add steps before sampling from it")
        return self._rows[torch.randint(len(self), (count,), generator=generator)]

    # ---------------------------------------------------------------- going on

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' rows, the oldest first; tensors and primitives."""
        return {"ranks": dist.gather(self._own_state())}

    def _own_state(self) -> dict[str, Any]:
        if self._rows is None:
            return {"added": 0, "rows": None}
        order = torch.arange(self.added - len(self), self.added) % self.capacity
        return {"added": self.added, "rows": self._rows[order].to_dict()}  # a copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore those rows; a smaller buffer keeps the newest."""
        shares = [share for share in state["ranks"] if share["rows"] is not None]
        self.added, self._rows = 0, None
        if not shares:
            return
        ranks = dist.world_size()
        kept = [TensorDict(share["rows"], [_length(share["rows"])]) for share in shares]
        if len(shares) == ranks:
            own, added = kept[dist.rank()], shares[dist.rank()]["added"]
        else:
            own = torch.cat(kept)[dist.rank() :: ranks]
            added = max(sum(share["added"] for share in shares) // ranks, len(own))
        self.added = added - len(own)
        self.add(own)


def _length(rows: Mapping[str, Any]) -> int:
    return len(rows["terminated"])


def _require_alike(ours: TensorDict, theirs: TensorDict) -> None:
    """Refuse rows of another shape, which would be broadcast, or with missing keys."""
    known = dict(ours.items(True, True))
    given = dict(theirs.items(True, True))
    for key in {**known, **given}:  # in order: the message is the same every time
        was, now = _kind(known.get(key)), _kind(given.get(key))
        if was != now:
            raise ConfigError(
                f"the buffer holds {was} as {key}, but was given {now}; observations must not "
                "change in kind, so start a new run for another environment"
            )


def _kind(rows: Tensor | None) -> str:
    return "nothing" if rows is None else f"{rows.dtype} {tuple(rows.shape[1:])}"
