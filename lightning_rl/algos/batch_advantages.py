"""Advantages without groups or critic: the baseline is the batch, or the past."""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.algos.advantages import (
    Advantage,
    gae,
    group_means,
    spread_over_tokens,
    total_rewards,
    whiten,
)
from lightning_rl.arguments import configurable
from lightning_rl.data.packing import token_rows
from lightning_rl.dist import global_mean_std
from lightning_rl.errors import ConfigError


@configurable
@dataclass(frozen=True)
class ReinforcePlusPlus(Advantage):
    """Reward-to-go, normalised over the global batch (Hu et al. 2025, REINFORCE++).

    A[t] = r + sum of ``token_rewards`` from t on (the KL in the reward, see ``kl_reward``), then
    (A - mean) / std over all model tokens of all ranks.

    Args:
        group_baseline: first subtract the group's mean reward (REINFORCE++-baseline).
    """

    group_baseline: bool = False

    @property
    def min_group_size(self) -> int:
        return 2 if self.group_baseline else 1

    def __call__(self, batch: TensorDict) -> TensorDict:
        tokens, row = batch["tokens"], token_rows(batch)
        live = tokens["loss_mask"].nonzero().squeeze(1)
        rewards_R = batch["rollouts", "reward"]
        if self.group_baseline:
            rewards_R = rewards_R - group_means(rewards_R, batch["rollouts", "group"])
        advantages = rewards_R[row[live]]
        if "token_rewards" in tokens:
            own = tokens["token_rewards"][live]
            # With no critic and gamma = lambda = 1, the recursion of GAE is the reward-to-go.
            advantages = advantages + gae(own, torch.zeros_like(own), row[live], 1.0, 1.0)[0]
        empty = torch.zeros_like(tokens["rollout_logprobs"])
        tokens["advantages"] = empty.index_put((live,), whiten(advantages))
        return batch


@configurable
class RunningBaseline(Advantage):
    """A = r - b with b a running mean of past rewards (Williams 1992, REINFORCE).

    b becomes decay b + (1 - decay) mean(r) after each batch. The first batch is its own baseline.

    Args:
        decay: how slowly b follows; in [0, 1).

    Raises:
        ConfigError: for a decay out of range.
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"RunningBaseline(decay={decay}) must be in [0, 1)")
        self.decay = decay
        self.baseline: float | None = None

    def __call__(self, batch: TensorDict) -> TensorDict:
        rewards_R = total_rewards(batch)
        mean = float(global_mean_std(rewards_R)[0])
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = self.decay * baseline + (1 - self.decay) * mean
        return spread_over_tokens(batch, rewards_R - baseline)

    def state_dict(self) -> dict[str, Any]:
        """The baseline, which a resumed run goes on with."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.baseline = state["baseline"]
