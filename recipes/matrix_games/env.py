"""Define MatrixGame: two players act at once, round by round, as torchrl sees it."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least

PLAYERS = ("row", "column")


@configurable
class MatrixGame(EnvBase):
    """Plays many games side by side between ``row`` and ``column``, each of some rounds.

    A player sees which pair of actions was the last one, (1 + R * C,): nothing yet, or row's action
    times C plus column's.

    Args:
        pays: of both players, what they get for each pair of actions, (2, R, C).
        rounds: of a game.
        num_envs: games side by side.

    Raises:
        ConfigError: for values out of range, or payoffs of another shape.
    """

    batch_locked = True

    def __init__(self, pays: list[list[list[float]]], rounds: int = 1, num_envs: int = 256) -> None:
        require_at_least(1, rounds=rounds, num_envs=num_envs)
        super().__init__(batch_size=[num_envs])
        self.pays = torch.tensor(pays, dtype=torch.float)
        if self.pays.ndim != 3 or len(self.pays) != 2:
            raise ConfigError(
                f"pays has shape {tuple(self.pays.shape)} and must have (2, R, C): of both "
                "players, for each pair of actions"
            )
        self.rounds = rounds
        self.group_map = {name: [name] for name in PLAYERS}
        self.last = torch.zeros(num_envs, dtype=torch.long)
        self.round = 0
        pairs = 1 + self.pays[0].numel()
        seen = {name: self._own(observation=Unbounded((num_envs, 1, pairs))) for name in PLAYERS}
        acts = {
            name: self._own(action=Categorical(int(count), shape=(num_envs, 1)))
            for name, count in zip(PLAYERS, self.pays.shape[1:], strict=True)
        }
        paid = {name: self._own(reward=Unbounded((num_envs, 1, 1))) for name in PLAYERS}
        self.observation_spec = Composite(**seen, shape=(num_envs,))
        self.action_spec = Composite(**acts, shape=(num_envs,))
        self.reward_spec = Composite(**paid, shape=(num_envs,))

    def _own(self, **specs: Any) -> Composite:
        return Composite(**specs, shape=(*self.batch_size, 1))

    def _set_seed(self, seed: int | None) -> None:
        """Ignore the seed: nothing is drawn."""

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        self.last, self.round = torch.zeros_like(self.last), 0  # all games begin and end together
        return TensorDict(self._seen(), self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        row, column = (tensordict[name, "action"].reshape(-1) for name in PLAYERS)
        self.last = 1 + row * self.pays.shape[2] + column
        self.round += 1
        after = TensorDict(self._seen(), self.batch_size)
        for name, paid in zip(PLAYERS, self.pays[:, row, column], strict=True):
            after[name, "reward"] = paid.reshape(-1, 1, 1)
        done = torch.full((*self.batch_size, 1), self.round >= self.rounds)
        after["done"] = after["terminated"] = done
        return after

    def _seen(self) -> dict[str, dict[str, Tensor]]:
        pairs = 1 + self.pays[0].numel()
        seen = torch.nn.functional.one_hot(self.last, pairs).float().unsqueeze(1)
        return {name: {"observation": seen.clone()} for name in PLAYERS}
