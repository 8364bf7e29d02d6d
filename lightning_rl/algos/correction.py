"""Off-policy correction: the engine that sampled is not exactly the policy that learns.

A token's importance weight is w = exp(log p_old - log p_engine): how much likelier the trainer's
old policy makes it than the engine did (other numerics, or stale weights). With PPO's own ratio to
the old policy this is decoupled PPO (Hilton et al. 2022): behaviour, proximal and current policy.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.ratio_losses import row_means
from lightning_rl.errors import ConfigError


class Correction(ABC):
    """Weights (M,) that multiply the policy loss of each token, without gradient."""

    @abstractmethod
    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        """From log w (M,) and the rollout of each token (M,)."""

    def __call__(self, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        """Weights, and metrics of the raw ones: their size and the share that was changed.

        From ``weight_raw`` and its square follows the effective sample size, once all tokens are in
        (:func:`add_effective_share`).
        """
        log_weight = tokens["old_logprobs"] - tokens["rollout_logprobs"]
        weights = self.weights(log_weight, tokens["row"])
        # Bounded so that one absurd weight leaves the metrics finite.
        raw = self.raw(log_weight, tokens["row"]).clamp(max=30.0).exp()
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


class _Sequence(Correction, ABC):
    """Weighs a whole rollout by the geometric mean of its tokens' weights."""

    def raw(self, log_weight: Tensor, row: Tensor) -> Tensor:
        return row_means(log_weight, row)


@dataclass(frozen=True)
class TokenTIS(Correction):
    """Truncated importance sampling, min(w, cap) per token (Yao et al. 2025, "off-policy RL").

    Raises:
        ConfigError: unless ``cap`` is at least 1.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ConfigError(f"{type(self).__name__}(cap={self.cap}) must be >= 1")

    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        return self.raw(log_weight, row).exp().clamp(max=self.cap)


@dataclass(frozen=True)
class SequenceTIS(_Sequence, TokenTIS):
    """The same with one weight per rollout, the geometric mean over its tokens."""


@dataclass(frozen=True)
class TokenMIS(Correction):
    """Masked importance sampling: w within [low, high], else 0 (IcePop, Ring-1T 2025).

    Raises:
        ConfigError: unless 0 <= low < 1 < high.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise ConfigError(
                f"{type(self).__name__}(low={self.low}, high={self.high}): need 0 <= low < 1 < high"
            )

    def weights(self, log_weight: Tensor, row: Tensor) -> Tensor:
        w = self.raw(log_weight, row).exp()
        return torch.where((w >= self.low) & (w <= self.high), w, 0.0)


@dataclass(frozen=True)
class SequenceMIS(_Sequence, TokenMIS):
    """The same with one weight per rollout: keeps or drops it as a whole."""


def add_effective_share(metrics: dict[str, float]) -> dict[str, float]:
    """Add ``correction/ess_share`` where a correction was at work, from the means of w and w^2.

    Effective sample size over the number of tokens, (sum w)^2 / (M sum w^2), in (0, 1].
    """
    square = metrics.pop("correction/weight_raw_square", None)
    if square:
        metrics["correction/ess_share"] = metrics["correction/weight_raw"] ** 2 / square
    return metrics
