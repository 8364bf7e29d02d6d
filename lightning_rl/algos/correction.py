"""Off-policy correction: the engine that sampled is not exactly the policy that learns.

A token's importance weight is w = exp(log p_old - log p_engine): how much likelier the trainer's
old policy makes it than the engine did (other numerics, or stale weights). With PPO's own ratio to
the old policy this is decoupled PPO (Hilton et al. 2022): behaviour, proximal and current policy.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.kl import ratios, row_means, row_sums
from lightning_rl.algos.losses import Metrics
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError


class Correction(ABC):
    """Weights (M,) that multiply the policy loss of each token, without gradient."""

    @abstractmethod
    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        """Return the weights (M,) from log w (M,) and the rollout of each token (M,)."""

    def __call__(self, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        """Weights, and metrics of the raw ones: their size and the share that was changed.

        From ``weight_raw`` and its square follows the effective sample size, once all tokens are in
        (:func:`add_effective_share`).
        """
        log_weight = tokens["old_logprobs"] - tokens["rollout_logprobs"]
        weights = self.weights(log_weight, tokens["row"])
        raw = ratios(self.raw(log_weight, tokens["row"]))
        changed = ~torch.isclose(weights, raw, rtol=1e-6, atol=0.0)
        return weights, {
            "weight_mean": weights,
            "weight_max": raw,
            "weight_raw": raw,
            "weight_raw_square": raw**2,
            "corrected_share": changed.float(),
        }

    def raw(self, log_weight: Tensor, row: Tensor) -> Tensor:
        """Log weights before bounds, (M,): per token."""
        return log_weight


@configurable
@dataclass(frozen=True)
class TokenTIS(Correction):
    """Truncated importance sampling, min(w, cap) per token (Yao et al. 2025, "off-policy RL").

    TRL's ``token_truncate`` and verl's ``rollout_is: token``.

    Args:
        cap: largest weight; larger ones count as much.

    Raises:
        ConfigError: unless ``cap`` is at least 1, and finite.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.cap < math.inf:
            raise ConfigError(f"{type(self).__name__}(cap={self.cap}) must be >= 1, and finite")

    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        return ratios(self.raw(log_weight, row)).clamp(max=self.cap)


@configurable
@dataclass(frozen=True)
class TokenMIS(Correction):
    """Masked importance sampling: w within [low, high], else 0 (IcePop, Ring-1T 2025).

    TRL's ``token_mask``. What is dropped still counts where the loss is averaged.

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.
        weighted: a kept token weighs w; False: 1, which is rejection sampling as in verl.

    Raises:
        ConfigError: unless 0 <= low < 1 < high, and ``high`` is finite.
    """

    low: float = 0.5
    high: float = 5.0
    weighted: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high < math.inf:
            raise ConfigError(
                f"{type(self).__name__}(low={self.low}, high={self.high}): need 0 <= low < 1 < "
                "high, and high finite"
            )

    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        w = ratios(self.raw(log_weight, row))
        kept = (w >= self.low) & (w <= self.high)
        return torch.where(kept, w if self.weighted else torch.ones_like(w), 0.0)


class _Sequence(Correction, ABC):
    """Weights a whole rollout by the product of its tokens' weights: how much likelier it is."""

    def raw(self, log_weight: Tensor, row: Tensor) -> Tensor:
        return row_sums(log_weight, row)


@configurable
@dataclass(frozen=True)
class SequenceTIS(_Sequence, TokenTIS):
    """min(w, cap) with one w per rollout, the product over its tokens (Liu et al. 2025,
    "When Speed Kills Stability"): unbiased up to the cap, and the noisier the longer rollouts are.

    TRL's ``sequence_truncate`` (cap 3) and verl's ``rollout_is: sequence`` (cap 2).
    """


@configurable
@dataclass(frozen=True)
class SequenceMIS(_Sequence, TokenMIS):
    """Keeps or drops a rollout as a whole, by the product of its tokens' weights.

    The defaults are those of TRL's ``sequence_mask``: no lower bound, since a small weight already
    takes a rollout's influence. For rollouts of hundreds of tokens few are within any bounds;
    :class:`GeometricMIS` has a scale that does not grow with length.
    """

    low: float = 0.0
    high: float = 3.0


class _Geometric(Correction, ABC):
    """Weights a whole rollout by the geometric mean of its tokens' weights, as GSPO's ratio."""

    def raw(self, log_weight: Tensor, row: Tensor) -> Tensor:
        return row_means(log_weight, row)


@configurable
@dataclass(frozen=True)
class GeometricTIS(_Geometric, TokenTIS):
    """min(w, cap) with one w per rollout, the geometric mean over its tokens.

    A cap of 1.001 is a mean of 0.001 nats per token: 1 nat, or a product of 2.7, in 1,000 tokens.
    """

    cap: float = 1.001


@configurable
@dataclass(frozen=True)
class GeometricMIS(_Geometric, TokenMIS):
    """Keeps or drops a rollout as a whole, by the geometric mean of its tokens' weights.

    The bounds are those of verl's geometric rejection, ±0.001 nats per token.
    """

    low: float = 0.999
    high: float = 1.001


def add_effective_share(metrics: dict[str, float]) -> dict[str, float]:
    """Add ``correction/ess_share`` where a correction applied, from the means of w and w^2.

    Effective sample size over the number of tokens, (sum w)^2 / (M sum w^2), in (0, 1].
    """
    square = metrics.pop("correction/weight_raw_square", None)
    if square:
        metrics["correction/ess_share"] = metrics["correction/weight_raw"] ** 2 / square
    return metrics
