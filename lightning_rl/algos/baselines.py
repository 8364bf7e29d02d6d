"""More advantages: relative to the rollouts of a group, to the batch, or to past rewards."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import comb, nan
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import (
    GRPO,
    Advantage,
    GroupAdvantage,
    WithinGroups,
    episodes_of,
    gae,
    group_means,
    on_tokens,
    spread_over_tokens,
    total_rewards,
    whiten,
)
from lightning_rl.config.arguments import configurable
from lightning_rl.data.episodes import CallTable, calls_of
from lightning_rl.data.plans import GroupPlan
from lightning_rl.errors import ConfigError, require_finite
from lightning_rl.rollout import Group, Rollout, Row
from lightning_rl.run.processes.dist import global_mean_std


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """A = r - mean of the group (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    That is ``GRPO(normalize_std=False)``. The paper also changes the aggregation: use it with
    ``TokenSum``, which has no length bias.
    """

    normalize_std: bool = field(default=False, init=False)
    eps: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class RLOO(GroupAdvantage):
    """A = r - mean of the *other* rollouts of the group (Ahmadian et al. 2024, eq. 9).

    With G rollouts that is G / (G - 1) times (r - mean); a group of one gets zero.
    """

    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
        size = counts[inverse]
        return (rewards - group_means(rewards, group)) * size / (size - 1).clamp(min=1)


@dataclass(frozen=True)
class MaxRL(GroupAdvantage):
    """A = (r - mean) / mean of the group (Tajwar et al. 2026, "Maximum Likelihood RL").

    For rewards >= 0, so ``kl_reward`` is refused. The rarer a success, the more it counts: the
    expected gradient approaches that of log likelihood as groups grow. A group without any reward
    gets zero.
    """

    takes_kl_reward: ClassVar[bool] = False

    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        mean = group_means(rewards, group)
        return torch.where(mean > 0, (rewards - mean) / mean.clamp(min=1e-12), 0.0)


@configurable
@dataclass(frozen=True)
class PassAtK(GroupAdvantage):
    """Trains pass@k instead of pass@1 (Chen et al. 2025, "Pass@k Training", eqs. 14-15).

    With n rollouts, m of them wrong, mean R = 1 - C(m, k) / C(n, k) and std s = sqrt(R (1 - R)):
    A(right) = (1 - R) / s and A(wrong) = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s. If s is 0
    (all sets of k alike), all are zero; also if failed rollouts left fewer than k. Success is
    judged by the reward alone, so ``kl_reward`` is refused.

    Args:
        k: number of samples, at least one of which must be right.
        success_reward: a rollout with at least this reward is right.

    Raises:
        ConfigError: if ``k`` is less than 1, or ``success_reward`` not finite.
    """

    k: int = 2
    success_reward: float = 1.0
    takes_kl_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_finite(success_reward=self.success_reward)
        if self.k < 1:
            raise ConfigError(f"PassAtK(k={self.k}) must be >= 1")

    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        right = rewards >= self.success_reward
        advantages = torch.zeros_like(rewards)
        for number in group.unique():
            rows = group == number
            n = int(rows.sum())
            for value, of in self._levels(n, int((rows & ~right).sum())):
                advantages[rows & (right == of)] = value
        return advantages

    @property
    def min_group_size(self) -> int:  # type: ignore[override]
        return max(2, self.k)

    def _levels(self, n: int, wrong: int) -> list[tuple[float, bool]]:
        if n < self.k:
            return []
        mean = 1 - comb(wrong, self.k) / comb(n, self.k)
        std = (mean * (1 - mean)) ** 0.5
        if std == 0:
            return []
        fails_with_me = comb(wrong - 1, self.k - 1) / comb(n - 1, self.k - 1)
        return [((1 - mean) / std, True), ((1 - mean - fails_with_me) / std, False)]


@configurable
@dataclass(frozen=True)
class OPMD(GroupAdvantage):
    """Online policy mirror descent with the group's soft maximum as baseline.

    A = (r - tau log mean exp(r / tau)) / (1 + tau): the baseline estimates tau log Z of the optimal
    policy's normaliser (Kimi k1.5, 2025, section 2.3.2; the factor is Trinity-RFT's, Pan et al.
    2025). The paper's loss is ``Reinforce``; with several updates per batch, ``PPOClip`` is more
    stable.

    Args:
        tau: strength of the pull to the old policy; large values give (r - mean) / (1 + tau).
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        require_finite(tau=self.tau)
        if self.tau <= 0:
            raise ConfigError(f"OPMD(tau={self.tau}) must be > 0")

    def compare(self, rewards: Tensor, group: Tensor) -> Tensor:
        # The group's largest reward is taken out first, so that exp cannot overflow.
        _, inverse = group.unique(return_inverse=True)
        peak = torch.full_like(rewards, -torch.inf).scatter_reduce(0, inverse, rewards, "amax")[
            inverse
        ]
        soft = group_means(((rewards - peak) / self.tau).exp(), group).log()
        return (rewards - peak - self.tau * soft) / (1 + self.tau)


@configurable
@dataclass(frozen=True)
class GDPO(WithinGroups):
    """Rewards that are normalised apart and then added (Liu et al. 2026, GDPO, arXiv 2601.05242).

    Of each reward function k with weight w_k (``reward_weights``), A_k = (r_k - mean of its group)
    / (std of its group + eps); then A = sum of w_k A_k / (std of that sum over the batch + eps).
    The mean that the paper subtracts last is 0. Combinations of scores with equal sums get
    different advantages, and a function with small scores counts as much as others.

    A function that returned None for a rollout adds nothing to its A, and the mean and std are
    those of the group's other rollouts. A reward that no function gave, such as a role's own, is
    one more part. ``kl_reward`` is refused; filters such as ``RewardSpread`` look at the sum.

    Args:
        eps: keeps parts that are equal in a group finite (they add nothing).

    Raises:
        ConfigError: unless ``eps`` is positive and finite.
    """

    eps: float = 1e-6
    takes_kl_reward: ClassVar[bool] = False
    per_group: ClassVar[bool] = False  # the std of the whole batch divides all

    def __post_init__(self) -> None:
        require_finite(eps=self.eps)
        if self.eps <= 0:
            raise ConfigError(
                f"GDPO(eps={self.eps}) must be > 0: it divides parts that are equal in a group"
            )

    def __call__(self, batch: TensorDict) -> TensorDict:
        rewards, group, of_row = episodes_of(batch)
        parts, weights = (
            x.new_zeros(len(rewards), x.shape[1]).index_put((of_row,), x)
            for x in (batch["rollouts", "reward_parts"], batch["rollouts", "part_weights"])
        )
        normalized = GRPO(eps=self.eps)
        added = torch.zeros_like(parts[:, 0])
        for part, weight in zip(parts.T, weights.T, strict=True):
            given = ~part.isnan()
            added[given] += weight[given] * normalized.compare(part[given], group[given])
        graded = ~parts.isnan().all(1)  # imitated rollouts are not
        std = global_mean_std(added[graded], unbiased=True)[1]
        return spread_over_tokens(batch, (added / (std + self.eps))[of_row])


@dataclass(frozen=True)
class ReMax(Advantage, GroupPlan):
    """A[t] = r - reward of a greedy rollout of the same prompt (Li et al. 2023, arXiv 2310.10505).

    Each group is written one greedy rollout more, which is graded like the others, but neither
    trained on nor counted in metrics. With ``kl_reward``, the sum of ``token_rewards`` from t on is
    added, as in verl. A group whose greedy rollout failed gets zero. A group of one is enough.

    Raises:
        ConfigError: if the batch was collected without greedy rollouts.
    """

    per_group: ClassVar[bool] = True

    def begin(self, group: Group, another: Callable[[], Rollout]) -> Group:
        greedy = another()
        greedy.sampling = replace(greedy.sampling, temperature=0.0)
        greedy.trained = False
        return [*group, greedy]

    def finish(self, group: Group) -> Group:
        """Write the greedy rollout's reward into the rows of the others; NaN if it has none."""
        greedy = next(r for r in group if not r.trained and r.sampling.temperature == 0)
        known = greedy.completed and greedy.reward is not None

        def compared(row: Row) -> Row:
            baseline = {"baseline": greedy.reward_of(row.role) if known else nan}
            return replace(row, compared_with=row.compared_with | baseline)

        return [replace(rollout, rows=list(map(compared, rollout.rows))) for rollout in group]

    def __call__(self, batch: TensorDict) -> TensorDict:
        if not len(batch["rollouts"]):  # of a process whose groups all failed
            batch["rollouts", "baseline"] = batch["rollouts", "reward"]
        if "baseline" not in batch["rollouts"]:
            raise ConfigError(
                "advantage=ReMax needs a greedy rollout in each group, which this batch has not; "
                "collect it by fit with an RLDataModule, or by your loop with its begin and finish"
            )
        calls, episodes = calls_of(batch), episodes_of(batch)
        baseline = torch.zeros_like(episodes.reward).index_put(
            (episodes.of_row,), batch["rollouts", "baseline"].to(episodes.reward.dtype)
        )
        credit = rewards_to_go(batch, calls, (episodes.reward - baseline).nan_to_num(0.0))
        batch["tokens", "advantages"] = on_tokens(batch, calls, credit)
        return batch


def rewards_to_go(batch: TensorDict, calls: CallTable, rewards: Tensor) -> Tensor:
    """Return each model token's (M,) reward of its episode (E,), with what follows of tokens' own.

    These are the ``token_rewards`` from the token on, if the batch has any.
    """
    episode = calls.episode[calls.of_token]
    credit = rewards[episode]
    if "token_rewards" not in batch["tokens"]:
        return credit
    call_rewards = batch["tokens", "token_rewards"][calls.tokens]
    # With no critic and gamma = lambda = 1, the recursion of GAE is the reward-to-go.
    return credit + gae(call_rewards, torch.zeros_like(call_rewards), episode, 1.0, 1.0)[0]


@configurable
@dataclass(frozen=True)
class ReinforcePlusPlus(Advantage):
    """Reward-to-go, normalised over the global batch (Hu et al. 2025, REINFORCE++).

    A[t] = r + sum of ``token_rewards`` from t on (the KL in the reward, see ``kl_reward``), then
    (A - mean) / std over all model tokens of all ranks.

    Args:
        group_baseline: first subtract the group's mean reward (REINFORCE++-baseline).
        unbiased: compute std with n - 1 instead of n tokens, as torch and verl do.
    """

    group_baseline: bool = False
    unbiased: bool = False

    @property
    def min_group_size(self) -> int:  # type: ignore[override]
        return 2 if self.group_baseline else 1

    def __call__(self, batch: TensorDict) -> TensorDict:
        tokens, calls = batch["tokens"], calls_of(batch)
        reward, group, _ = episodes_of(batch)
        if self.group_baseline:
            reward = reward - group_means(reward, group)
        empty = torch.zeros_like(tokens["rollout_logprobs"])
        made = whiten(rewards_to_go(batch, calls, reward), self.unbiased).to(empty.dtype)
        tokens["advantages"] = empty.index_put((calls.tokens,), made)
        return batch


@configurable
class RunningBaseline(Advantage):
    """A = r - b with b a running mean of past rewards (Williams 1992, REINFORCE).

    b becomes decay b + (1 - decay) mean(r) after each batch. The first batch is its own baseline.

    Args:
        decay: how slowly b follows the rewards; in [0, 1).

    Raises:
        ConfigError: for a decay out of range.
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"RunningBaseline(decay={decay}) must be in [0, 1)")
        self.decay = decay
        self.baseline: float | None = None

    def __call__(self, batch: TensorDict) -> TensorDict:
        episodes = episodes_of(batch)
        rewards = total_rewards(batch, episodes)
        mean = float(global_mean_std(rewards)[0])
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = self.decay * baseline + (1 - self.decay) * mean
        return spread_over_tokens(batch, rewards[episodes.of_row] - baseline)

    def state_dict(self) -> dict[str, Any]:
        """The baseline, from which a resumed run continues."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.baseline = state["baseline"]
