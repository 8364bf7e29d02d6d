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

from lightning_rl.data.packing import token_rows
from lightning_rl.dist import all_sum, world_size


class Aggregation(ABC):
    """Weights (T,) of a minibatch's tokens, zero outside of the loss mask."""

    @abstractmethod
    def weights(self, minibatch: TensorDict) -> Tensor:
        """Weights (T,) up to a common factor; calling the object makes them sum to one."""

    def __call__(self, minibatch: TensorDict) -> Tensor:
        weights = self.weights(minibatch)
        return weights * world_size() / all_sum(weights.sum()).clamp(min=1e-12)


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
