"""Advantages of turns: each call of the model is one step, and all of its tokens share its credit.

In all of them r[k] is the pay of call k of an episode: its own reward, the ``token_rewards`` of
its tokens, and for the last call whatever the episode was paid beyond its calls' rewards. ``gamma``
discounts from one call to the next, however many tokens they have.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import (
    GRPO,
    Advantage,
    CriticAdvantage,
    WithinGroups,
    episodes_of,
    gae,
    group_means,
    on_tokens,
    pairs,
    total_rewards,
)
from lightning_rl.config.arguments import configurable
from lightning_rl.data.episodes import CallTable, calls_of, received
from lightning_rl.errors import ConfigError, require_at_least, require_finite


def call_rewards(batch: TensorDict, calls: CallTable) -> Tensor:
    """Return the reward of each call, (C,); an episode's calls sum to its whole reward."""
    paid = received(batch, calls)[calls.tokens]
    return paid.new_zeros(len(calls.first)).index_add(0, calls.of_token, paid)


def call_returns(rewards: Tensor, episode: Tensor, gamma: float) -> Tensor:
    """R[k] = r[k] + gamma R[k+1] within each episode (C,), ascending; shape (C,)."""
    # With no critic and lambda = 1, the recursion of GAE is the return's.
    return gae(rewards, torch.zeros_like(rewards), episode, gamma, 1.0)[1]


def _require_fraction(of: Advantage, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{type(of).__name__}({name}={value}) must be in [0, 1]")


@configurable
@dataclass(frozen=True)
class TurnGAE(CriticAdvantage):
    """Generalised advantage estimation from call to call (Li et al. 2025, Turn-PPO).

    V[k], the value of call k, is the critic's at its first token, after all that it reads. With
    delta[k] = r[k] + gamma V[k+1] - V[k] and A[k] = delta[k] + gamma lam A[k+1], each token of the
    call gets A[k], and the critic's target at each is A[k] + V[k]. An episode ends with its last
    call.

    Args:
        gamma: discount per call.
        lam: how far ahead rewards count before the critic is believed, per call.
        whiten: give the batch's advantages mean 0 and standard deviation 1, over all tokens of all
            ranks.
        unbiased: compute that deviation with n - 1 instead of n tokens.

    Raises:
        ConfigError: unless ``gamma`` and ``lam`` are in [0, 1].
    """

    def __post_init__(self) -> None:
        _require_fraction(self, gamma=self.gamma, lam=self.lam)

    def __call__(self, batch: TensorDict) -> TensorDict:
        calls = calls_of(batch)
        rewards, values = call_rewards(batch, calls), batch["tokens", "values"]
        values_C = values[calls.tokens[calls.first]]
        advantages_C, returns_C = gae(rewards, values_C, calls.episode, self.gamma, self.lam)
        of_token = calls.of_token
        return self.give(batch, calls, advantages_C[of_token], returns_C[of_token])


@configurable
@dataclass(frozen=True)
class RewardToGo(WithinGroups):
    """The return of a call minus that of the same call in other rollouts; needs no critic.

    A[k] = R[k] - b[k], with R[k] = r[k] + gamma R[k+1]: a call gets no credit for earlier rewards
    (Williams 1992; Sutton et al. 2000, eq. 2). b[k] is the mean return of the k-th calls of the
    *other* rollouts: a baseline per time step (Peters and Schaal 2008) that leaves one out, as
    :class:`RLOO` does. If no other rollout made that many calls, b[k] is the mean return of their
    last calls. With gamma 1 the gradient is unbiased. A group of one gets zero.

    Args:
        gamma: discount per call.

    Raises:
        ConfigError: unless ``gamma`` is in [0, 1].
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        _require_fraction(self, gamma=self.gamma)

    def __call__(self, batch: TensorDict) -> TensorDict:
        calls, group = calls_of(batch), episodes_of(batch).group
        returns = call_returns(call_rewards(batch, calls), calls.episode, self.gamma)
        baseline = self.baseline(returns, calls, group[calls.episode])
        advantages = on_tokens(batch, calls, (returns - baseline)[calls.of_token])
        batch["tokens", "advantages"] = advantages
        return batch

    @staticmethod
    def baseline(returns: Tensor, calls: CallTable, group: Tensor) -> Tensor:
        """Return the others' mean return (C,), for returns (C,) and groups (C,) of calls."""
        like = pairs(group, calls.place)
        others, count = _means_of_others(returns, like)
        last = torch.ones_like(group, dtype=torch.bool)
        last[:-1] = calls.episode[1:] != calls.episode[:-1]
        _, of_episode = calls.episode.unique_consecutive(return_inverse=True)
        ends, rollouts = (x[of_episode] for x in _means_of_others(returns[last], group[last]))
        return torch.where(count > 0, others, torch.where(rollouts > 0, ends, returns))


def _means_of_others(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (N,) of the other values of the group, 0 if none, and their number (N,)."""
    _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
    others = counts[inverse] - 1
    mean = group_means(values, group)
    # From the mean and not the sum: values that are all alike then have exactly that mean.
    return torch.where(others > 0, mean + (mean - values) / others.clamp(min=1), 0.0), others


@configurable
@dataclass(frozen=True)
class GiGPO(WithinGroups):
    """Group-in-group advantages (Feng et al. 2025, GiGPO, arXiv 2505.10978, eqs. 3 and 5 to 8).

    A[k] = A_E + omega A_S[k] (eq. 8). A_E compares rollouts of a group by their rewards (eq. 3), as
    :class:`GRPO` does. A_S compares calls of the group that were made in the same state, in any of
    its rollouts and however late (eq. 6), by their returns R[k] = r[k] + gamma R[k+1] (eq. 5), in
    the same way (eq. 7); a call whose state no other call has gets A_S = 0. The environment names
    states: ``Reply(state=...)``.

    Args:
        omega: weight of the comparison by states; 0 leaves GRPO.
        gamma: discount per call, of the returns that are compared.
        normalize_std: the paper's F_norm: True divides by standard deviations, False by 1.
        eps: keeps calls and rollouts with equal returns finite (their advantages are zero).

    Raises:
        ConfigError: for values out of range, or a batch with a call whose state has no name.
    """

    omega: float = 1.0
    gamma: float = 0.95
    normalize_std: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _require_fraction(self, gamma=self.gamma)
        require_finite(omega=self.omega, eps=self.eps)
        require_at_least(0, omega=self.omega, eps=self.eps)

    def __call__(self, batch: TensorDict) -> TensorDict:
        episodes, calls = episodes_of(batch), calls_of(batch)
        compare = GRPO(self.normalize_std, self.eps).compare
        of_episode = compare(total_rewards(batch, episodes), episodes.group)[calls.episode]
        returns = call_returns(call_rewards(batch, calls), calls.episode, self.gamma)
        anchors = pairs(episodes.group[calls.episode], self._states(batch, calls))
        advantages = of_episode + self.omega * compare(returns, anchors)
        batch["tokens", "advantages"] = on_tokens(batch, calls, advantages[calls.of_token])
        return batch

    @staticmethod
    def _states(batch: TensorDict, calls: CallTable) -> Tensor:
        """Return the state of each call, (C,)."""
        first = calls.tokens[calls.first]
        states = batch["tokens"].get("state", None)
        result = torch.full_like(first, -1) if states is None else states[first]
        nameless = int((result < 0).sum())
        if nameless:
            raise ConfigError(
                "advantage=GiGPO compares calls made in equal states, but the states of "
                f"{nameless} of {len(result)} calls have no name; let the environment name what "
                "the model reads next, Reply(state=...), or use RewardToGo, which needs no states"
            )
        return result
