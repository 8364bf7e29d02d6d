"""How token losses become one number: weights per token, fixed before a minibatch is cut.

The loss of a minibatch is the sum of weight x token loss over all its packs and ranks, so gradients
do not depend on how it was cut. Totals are taken over all ranks; since Lightning's strategies
average gradients over ranks, weights are multiplied by the number of ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.arguments import configurable
from lightning_rl.data.packing import token_rows
from lightning_rl.dist import all_sum, world_size
from lightning_rl.errors import ConfigError


class Aggregation(ABC):
    """Weights (T,) of a minibatch's tokens, zero outside of the loss mask."""

    @abstractmethod
    def weights(self, minibatch: TensorDict) -> Tensor:
        """Weights (T,) up to a common factor; calling the object divides by :meth:`total`."""

    def total(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        """This rank's share of the divisor: by default the sum, so that weights sum to one."""
        return weights.sum()

    def __call__(self, minibatch: TensorDict) -> Tensor:
        weights = self.weights(minibatch)
        total = all_sum(self.total(minibatch, weights))
        return weights * world_size() / total.clamp(min=1e-12)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Every model token counts the same (DAPO, Yu et al. 2025, eq. 12)."""

    def weights(self, minibatch: TensorDict) -> Tensor:
        return minibatch["tokens", "loss_mask"].float()


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Every rollout counts the same: the mean of its tokens' mean (GRPO as first published)."""

    def weights(self, minibatch: TensorDict) -> Tensor:
        mask, row = minibatch["tokens", "loss_mask"].float(), token_rows(minibatch)
        count = torch.zeros(len(minibatch["rollouts"]), device=mask.device).index_add(0, row, mask)
        return mask / count.clamp(min=1)[row]


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """Every prompt counts the same: the mean of its group's token mean."""

    def weights(self, minibatch: TensorDict) -> Tensor:
        mask = minibatch["tokens", "loss_mask"].float()
        _, group = minibatch["rollouts", "group"].unique(return_inverse=True)
        group_T = group[token_rows(minibatch)]
        count = torch.zeros(int(group.max()) + 1, device=mask.device).index_add(0, group_T, mask)
        return mask / count.clamp(min=1)[group_T]


@configurable
@dataclass(frozen=True)
class TokenSum(Aggregation):
    """Sum over tokens / (rollouts x max_tokens): no length bias (Dr.GRPO, Liu et al. 2025).

    Args:
        max_tokens: the constant that stands in for a rollout's own length, e.g.
            ``sampling.max_tokens``.
    """

    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"TokenSum(max_tokens={self.max_tokens}) must be >= 1")

    def weights(self, minibatch: TensorDict) -> Tensor:
        return minibatch["tokens", "loss_mask"].float()

    def total(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        return weights.new_tensor(float(len(minibatch["rollouts"]) * self.max_tokens))
