"""Advantages: which tokens deserve credit. Pure functions first, thin classes over them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import token_rows
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.run.dist import global_mean_std


def group_means(rewards: Tensor, group: Tensor) -> Tensor:
    """Mean reward of each rollout's group, shape (R,), for rewards (R,) and group ids (R,)."""
    _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
    # Summed in float64: rewards that are all alike then have exactly that mean, so that nothing
    # but rounding is never mistaken for an advantage.
    sums = torch.zeros(len(counts), dtype=torch.double, device=rewards.device)
    means = sums.index_add(0, inverse, rewards.double()) / counts
    return means[inverse].to(rewards.dtype)


def group_stds(rewards: Tensor, group: Tensor) -> Tensor:
    """Unbiased standard deviation of each rollout's group, shape (R,); 0 for a group of one."""
    centred_squares = (rewards - group_means(rewards, group)) ** 2
    _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
    bessel = counts / (counts - 1).clamp(min=1)
    return (group_means(centred_squares, group) * bessel[inverse]).sqrt()


def gae(
    rewards: Tensor, values: Tensor, row: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each rollout's own tokens (Schulman et al. 2015).

    ``rewards``, ``values`` and ``row`` (the rollout of each token, ascending) have shape (M,); an
    episode ends with its last token, so nothing is bootstrapped there. Returns advantages and
    returns, both (M,): with delta[t] = r[t] + gamma V[t+1] - V[t],
    A[t] = delta[t] + gamma lam A[t+1] and return[t] = A[t] + V[t].
    """
    assert rewards.shape == values.shape == row.shape and rewards.ndim == 1
    _, inverse, counts = row.unique_consecutive(return_inverse=True, return_counts=True)
    step = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[inverse]
    # One row per rollout, padded on the right with zeros: a zero value after the end is exact.
    shape = (len(counts), int(counts.max()) + 1)
    grid_r, grid_v = (
        torch.zeros(shape, dtype=x.dtype, device=x.device).index_put((inverse, step), x)
        for x in (rewards, values)
    )
    delta = grid_r[:, :-1] + gamma * grid_v[:, 1:] - grid_v[:, :-1]
    advantage = torch.zeros_like(delta)
    carry = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        carry = delta[:, t] + gamma * lam * carry
        advantage[:, t] = carry
    advantages = advantage[inverse, step]
    return advantages, advantages + values


def whiten(advantages: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), over all ranks' tokens; shape (M,).

    The floor is a standard deviation of 1e-4, as in TRL and verl: what is smaller than that is
    rounding, and stays small.
    """
    mean, std = global_mean_std(advantages)
    return (advantages - mean) * (std**2 + 1e-8).rsqrt()


def total_rewards(batch: TensorDict) -> Tensor:
    """Each rollout's reward plus the sum of its ``token_rewards`` (e.g. a KL), shape (R,)."""
    rewards_R = batch["rollouts", "reward"]
    if "token_rewards" not in batch["tokens"]:
        return rewards_R
    return rewards_R.index_add(0, token_rows(batch), batch["tokens", "token_rewards"])


class Advantage(ABC):
    """Adds ``("tokens", "advantages")``, shape (T,), zero outside of the loss mask, to a batch.

    From rewards, groups, ``values`` and ``token_rewards``: ``old_logprobs`` may not be there yet,
    since a rollout whose advantages are all exactly 0 needs none.
    """

    needs_values: ClassVar[bool] = False
    takes_kl_reward: ClassVar[bool] = True
    """True where a reward may have a KL taken off; not where it says how good a rollout was."""

    @property
    def per_group(self) -> bool:
        """True where a group's advantages depend on nothing outside of it, and change nothing."""
        return False

    @property
    def min_group_size(self) -> int:
        """Rollouts that a group must have; above 1 for those that compare them."""
        return 1

    @abstractmethod
    def __call__(self, batch: TensorDict) -> TensorDict:
        """Return the batch with advantages (and ``returns``, where there is a critic)."""


def spread_over_tokens(batch: TensorDict, advantages_R: Tensor) -> TensorDict:
    """Give every model token of a rollout the rollout's advantage (R,)."""
    advantages_T = advantages_R[token_rows(batch)] * batch["tokens", "loss_mask"]
    batch["tokens", "advantages"] = advantages_T
    return batch


class GroupAdvantage(Advantage):
    """An advantage that is a function of rewards (R,) and group ids (R,), for each group apart."""

    @property
    def per_group(self) -> bool:
        return True

    @property
    def min_group_size(self) -> int:
        return 2

    def __call__(self, batch: TensorDict) -> TensorDict:
        advantages_R = self.compare(total_rewards(batch), batch["rollouts", "group"])
        return spread_over_tokens(batch, advantages_R)

    @abstractmethod
    def compare(self, rewards_R: Tensor, group_R: Tensor) -> Tensor:
        """Advantages (R,)."""


@configurable
@dataclass(frozen=True)
class GRPO(GroupAdvantage):
    """Group-relative advantages, one per rollout (Shao et al. 2024, DeepSeekMath, eq. 20).

    A = (r - mean of its group) / (std of its group + eps). A group of one gets zero.

    Args:
        normalize_std: divide by the group's standard deviation; False leaves A = r - mean.
        eps: keeps a group without spread finite (its advantages are zero).

    Raises:
        ConfigError: for a negative ``eps``, or one that is not finite.
    """

    normalize_std: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_finite(eps=self.eps)
        require_at_least(0, eps=self.eps)

    def compare(self, rewards_R: Tensor, group_R: Tensor) -> Tensor:
        advantages_R = rewards_R - group_means(rewards_R, group_R)
        if not self.normalize_std:
            return advantages_R
        return advantages_R / (group_stds(rewards_R, group_R) + self.eps)


@configurable
@dataclass(frozen=True)
class GAE(Advantage):
    """Generalised advantage estimation with a value head (Schulman et al. 2015; PPO 2017).

    The rollout's reward falls on its last model token, ``token_rewards`` (a KL in the reward) where
    they are. ``gamma`` and ``lam`` are per token.

    Args:
        whiten: give the batch's advantages mean 0 and standard deviation 1, over all ranks.

    Raises:
        ConfigError: unless ``gamma`` and ``lam`` are in [0, 1].
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"GAE(gamma={self.gamma}, lam={self.lam}): both must be in [0, 1]")

    @property
    def per_group(self) -> bool:
        return not self.whiten

    def __call__(self, batch: TensorDict) -> TensorDict:
        live = batch["tokens", "loss_mask"].nonzero().squeeze(1)
        row = token_rows(batch)[live]
        last = torch.ones_like(row, dtype=torch.bool)
        last[:-1] = row[1:] != row[:-1]
        values = batch["tokens", "values"][live]
        rewards = torch.where(last, batch["rollouts", "reward"][row], 0.0)
        if "token_rewards" in batch["tokens"]:
            rewards = rewards + batch["tokens", "token_rewards"][live]
        advantages, returns = gae(rewards, values, row, self.gamma, self.lam)
        if self.whiten:
            advantages = whiten(advantages)
        empty = torch.zeros_like(batch["tokens", "values"])
        batch["tokens", "advantages"] = empty.index_put((live,), advantages)
        batch["tokens", "returns"] = empty.index_put((live,), returns)
        return batch
