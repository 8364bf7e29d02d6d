"""Advantages: which tokens deserve credit. Pure functions first, thin classes over them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import episode_rows, token_rows
from lightning_rl.data.episodes import CallTable, calls_of, received
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.run.processes.dist import global_mean_std


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
    """Generalised advantage estimation over each rollout's own steps (Schulman et al. 2015).

    ``rewards``, ``values`` and ``row`` (the rollout of each step, ascending) have shape (M,); an
    episode ends with its last step, so nothing is bootstrapped there. Returns advantages and
    returns, both (M,): with delta[t] = r[t] + gamma V[t+1] - V[t],
    A[t] = delta[t] + gamma lam A[t+1] and return[t] = A[t] + V[t].
    """
    assert rewards.shape == values.shape == row.shape and rewards.ndim == 1
    _, inverse, counts = row.unique_consecutive(return_inverse=True, return_counts=True)
    step = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[inverse]
    # One row per rollout, padded on the right with zeros: a zero value after the end is exact.
    shape = (len(counts), (int(counts.max()) if len(counts) else 0) + 1)
    grid_r, grid_v = (
        torch.zeros(shape, dtype=x.dtype, device=x.device).index_put((inverse, step), x)
        for x in (rewards, values)
    )
    delta = grid_r[:, :-1] + gamma * grid_v[:, 1:] - grid_v[:, :-1]
    advantage = torch.zeros_like(delta)
    carry = delta.new_zeros(len(counts))
    for t in reversed(range(delta.shape[1])):
        carry = delta[:, t] + gamma * lam * carry
        advantage[:, t] = carry
    advantages = advantage[inverse, step]
    return advantages, advantages + values


def whiten(advantages: Tensor, unbiased: bool = False) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), over all ranks' tokens; shape (M,).

    The floor is a standard deviation of 1e-4, as in TRL and verl: smaller deviations are rounding
    errors and stay small. ``unbiased``: the variance of n tokens is divided by n - 1.
    """
    mean, std = global_mean_std(advantages, unbiased)
    return (advantages - mean) * (std**2 + 1e-8).rsqrt()


class Episodes(NamedTuple):
    """The E episodes of a batch's R rows: a rollout of several rows is compared as one.

    ``reward`` (E,); ``group`` (E,): episodes that are compared with each other have the same
    number, one for each prompt and role; ``of_row`` (R,): the episode of each row.
    """

    reward: Tensor
    group: Tensor
    of_row: Tensor


def episodes_of(batch: TensorDict) -> Episodes:
    """Collect rewards and groups by episode."""
    rollouts = batch["rollouts"]
    numbers, of_row = episode_rows(batch).unique(return_inverse=True)
    reward, group = (
        rollouts[name].new_zeros(len(numbers)).index_put((of_row,), rollouts[name])
        for name in ("reward", "group")
    )
    if "role" in rollouts:
        role = rollouts["role"].new_zeros(len(numbers)).index_put((of_row,), rollouts["role"])
        group = pairs(group, role)
    return Episodes(reward, group, of_row)


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """Number pairs, (N,): equal pairs get equal numbers. Both inputs count from 0."""
    return first * (second.max() + 1) + second if len(second) else first


def total_rewards(batch: TensorDict, episodes: Episodes) -> Tensor:
    """Each episode's reward plus the sum of its ``token_rewards`` (e.g. a KL), shape (E,)."""
    if "token_rewards" not in batch["tokens"]:
        return episodes.reward
    of_token = episodes.of_row[token_rows(batch)]
    paid = batch["tokens", "token_rewards"].to(episodes.reward.dtype)
    return episodes.reward.index_add(0, of_token, paid)


class Advantage(ABC):
    """Adds ``("tokens", "advantages")``, shape (T,), zero outside the loss mask, to a batch.

    It reads rewards, groups, ``values`` and ``token_rewards``, but not ``old_logprobs``, which may
    be computed later: a rollout whose advantages are all exactly 0 needs none. With several
    processes, a process's batch may have no rows.
    """

    needs_values: ClassVar[bool] = False
    takes_kl_reward: ClassVar[bool] = True
    """True if a KL may be subtracted from the reward; False if that would change its meaning."""
    takes_branches: ClassVar[bool] = False
    """True if rollouts may branch off from others (:class:`Branching`)."""
    needs_teacher: ClassVar[bool] = False
    """True if a teacher has to look at the rollouts (:class:`ModelTeacher`)."""
    per_group: ClassVar[bool] = False
    """True if a group's advantages neither depend on other groups nor change any state."""
    min_group_size: ClassVar[int] = 1
    """The minimum number of rollouts per group; above 1 if they are compared."""

    @abstractmethod
    def __call__(self, batch: TensorDict) -> TensorDict:
        """Return the batch with advantages (and ``returns``, if there is a critic)."""

    def at_present(self, logprobs: Tensor, tokens: TensorDict) -> Tensor:
        """Return the advantages (M,) of a pass, in which the policy has these logprobs (M,).

        ``tokens`` are what losses see (:mod:`lightning_rl.algos.losses`). By default they do not
        depend on the pass.
        """
        advantages: Tensor = tokens["advantages"]
        return advantages


def on_tokens(batch: TensorDict, calls: CallTable, values_M: Tensor) -> Tensor:
    """Scatter values (M,) of the calls' tokens to all tokens of the batch, (T,); 0 elsewhere."""
    empty = values_M.new_zeros(len(batch["tokens"]))
    return empty.index_put((calls.tokens,), values_M)


def spread_over_tokens(batch: TensorDict, advantages_R: Tensor) -> TensorDict:
    """Give every model token of a rollout the rollout's advantage (R,)."""
    advantages_T = advantages_R[token_rows(batch)] * batch["tokens", "loss_mask"]
    batch["tokens", "advantages"] = advantages_T
    return batch


class WithinGroups(Advantage):
    """An advantage that compares the rollouts of a group with each other only."""

    per_group: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 2


class GroupAdvantage(WithinGroups):
    """An advantage that is computed from the rewards of each group's episodes."""

    def __call__(self, batch: TensorDict) -> TensorDict:
        episodes = episodes_of(batch)
        advantages_E = self.compare(total_rewards(batch, episodes), episodes.group)
        return spread_over_tokens(batch, advantages_E[episodes.of_row])

    @abstractmethod
    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages (E,) of episodes with these rewards (E,) and groups (E,)."""


@configurable
@dataclass(frozen=True)
class GRPO(GroupAdvantage):
    """Group-relative advantages, one per rollout (Shao et al. 2024, DeepSeekMath, eq. 20).

    A = (r - mean of its group) / (std of its group + eps). A group of one gets zero.

    Args:
        normalize_std: divide by the group's standard deviation; False leaves A = r - mean.
        eps: keeps a group whose rewards are all equal finite (its advantages are zero).

    Raises:
        ConfigError: for a negative ``eps``, or one that is not finite.
    """

    normalize_std: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_finite(eps=self.eps)
        require_at_least(0, eps=self.eps)

    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        advantages = rewards - group_means(rewards, group)
        if not self.normalize_std:
            return advantages
        return advantages / (group_stds(rewards, group) + self.eps)


@dataclass(frozen=True)
class CriticAdvantage(Advantage):
    """Generalised advantage estimation over the steps that a subclass defines."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    unbiased: bool = False
    needs_values: ClassVar[bool] = True

    @property
    def per_group(self) -> bool:  # type: ignore[override]
        return not self.whiten

    def give(
        self, batch: TensorDict, calls: CallTable, advantages: Tensor, returns: Tensor
    ) -> TensorDict:
        """Set advantages and returns (M,) of the calls' tokens; 0 for all others."""
        if self.whiten:
            advantages = whiten(advantages, self.unbiased)
        batch["tokens", "advantages"] = on_tokens(batch, calls, advantages)
        batch["tokens", "returns"] = on_tokens(batch, calls, returns)
        return batch


@configurable
@dataclass(frozen=True)
class GAE(CriticAdvantage):
    """Generalised advantage estimation with a value head (Schulman et al. 2015; PPO 2017).

    A call's reward is paid at its last token, the rest of the rollout's reward (all of it, if no
    call has one) at its last model token, and ``token_rewards`` (a KL in the reward) at their own
    tokens. ``gamma`` and ``lam`` apply per token, in the order of the calls: the token that follows
    may be in another row of the episode.

    Args:
        gamma: discount per token.
        lam: weight of longer estimates: 0 for one step and the value that follows, 1 for the whole
            return.
        whiten: give the batch's advantages mean 0 and standard deviation 1, over all ranks.
        unbiased: compute that deviation with n - 1 instead of n tokens, as torch and verl do.

    Raises:
        ConfigError: unless ``gamma`` and ``lam`` are in [0, 1].
    """

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"GAE(gamma={self.gamma}, lam={self.lam}): both must be in [0, 1]")

    def __call__(self, batch: TensorDict) -> TensorDict:
        calls = calls_of(batch)
        live, episode = calls.tokens, calls.episode[calls.of_token]
        values, rewards = batch["tokens", "values"][live], received(batch, calls)[live]
        return self.give(batch, calls, *gae(rewards, values, episode, self.gamma, self.lam))
