"""Policy and value losses, per token; how tokens are averaged is :mod:`.aggregation`'s business.

A loss sees the M model tokens of a pack: ``logprobs`` (M,) under the current policy and
``tokens``, a TensorDict [M] with ``old_logprobs``, ``rollout_logprobs``, ``advantages``, ``row``
(which rollout a token belongs to), ``expert`` (it was given, not sampled) and, where computed,
``ref_logprobs``, ``values``, ``returns``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.kl import k3
from lightning_rl.algos.ratios import ratios
from lightning_rl.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite

Metrics = dict[str, Tensor]
"""Per-token tensors (M,), without gradient; the module averages them over all live tokens."""


class PolicyLoss(ABC):
    """Maps current logprobs to a loss per token.

    ``zero_at_zero_advantage``: the loss of a sampled token without advantage is 0, whatever its
    logprobs. Rollouts without any advantage are then left out of the update, which is exact.
    """

    zero_at_zero_advantage: ClassVar[bool] = False  # unless a loss says so, nothing is left out

    @abstractmethod
    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        """Loss (M,) and per-token metrics."""


def divergence(logprobs: Tensor, tokens: TensorDict) -> Metrics:
    """``kl_old`` (M,): k3 estimate of how far the policy has moved from the one that is old."""
    return {"kl_old": k3(tokens["old_logprobs"], logprobs.detach())}


def check_clip(low: float, high: float, hint: str = "") -> None:
    """Refuse impossible bounds of a clipped ratio.

    Raises:
        ConfigError: naming both, and ``hint`` after what they need.
    """
    require_finite(clip_low=low, clip_high=high)
    if not 0 < low < 1 or high <= 0:
        raise ConfigError(
            f"clip_low={low}, clip_high={high}: need 0 < clip_low < 1 and clip_high > 0{hint}"
        )


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, -min(w A, clip(w, 1 - low, 1 + high) A) with w = exp(logp - old logp).

    All arguments and both results have shape (M,); the second is where the clip took the gradient
    away (Schulman et al. 2017, PPO, eq. 7; asymmetric bounds from DAPO, Yu et al. 2025). ``dual``
    bounds the loss of a negative advantage at -dual A, so that a large ratio cannot blow it up
    (dual-clip PPO, Ye et al. 2020, eq. 8).
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape and logprobs.ndim == 1
    ratio = ratios(logprobs - old_logprobs)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    objective, cut = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual is not None:
        floor = dual * advantages
        below = (advantages < 0) & (objective < floor)
        objective, cut = torch.where(below, floor, objective), cut | below
    return -objective, cut


@configurable
@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7).

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher (Yu et al. 2025).

    Args:
        dual_clip: bound on the loss of negative advantages, in units of the advantage (3 in the
            paper); None for none.

    Raises:
        ConfigError: for bounds outside of 0 < clip_low < 1, clip_high > 0, dual_clip > 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(dual_clip=self.dual_clip)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip={self.dual_clip} must be > 1; 3 is usual, null for none")
        check_clip(self.clip_low, self.clip_high, "; 0.2 and 0.2 are PPO's defaults")

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        loss, clipped = ppo_clip(
            logprobs,
            tokens["old_logprobs"],
            tokens["advantages"],
            self.clip_low,
            self.clip_high,
            self.dual_clip,
        )
        return loss, divergence(logprobs, tokens) | {"clip_frac": clipped.float()}


@configurable
@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic, times ``coef``; optionally clipped as in PPO.

    Args:
        coef: weight beside the policy loss.
        clip: None, or how far values may move from the rollout's before the larger error counts.

    Raises:
        ConfigError: for a negative value, or one that is not finite.
    """

    coef: float = 0.5
    clip: float | None = None

    def __post_init__(self) -> None:
        require_finite(coef=self.coef, clip=self.clip)
        require_at_least(0, coef=self.coef, clip=self.clip)

    def __call__(self, values: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        returns, old = tokens["returns"], tokens["values"]
        error = (values - returns) ** 2
        if self.clip is not None:
            moved = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (moved - returns) ** 2)
        return 0.5 * self.coef * error, {"value_error": (values.detach() - returns) ** 2}
