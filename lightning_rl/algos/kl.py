"""Keeping the policy near a frozen reference."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lightning_rl.errors import ConfigError


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(policy || reference) per token, shape (M,).

    exp(d) - d - 1 with d = ref - logp (Schulman 2020, "Approximating KL divergence", k3).
    """
    d = ref_logprobs - logprobs
    return d.expm1() - d


@dataclass(frozen=True)
class KLPenalty(ABC):
    """``coef`` times a per-token KL estimate, added to the loss.

    Raises:
        ConfigError: if ``coef`` is not positive (leave the penalty out instead: ``kl: null``).
    """

    coef: float

    def __post_init__(self) -> None:
        if self.coef <= 0:
            raise ConfigError(f"kl coef={self.coef} must be > 0; for no KL penalty set kl: null")

    @abstractmethod
    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """KL estimate per token (M,), without the coefficient."""


@dataclass(frozen=True)
class K3Penalty(KLPenalty):
    """GRPO's penalty (Shao et al. 2024, DeepSeekMath, eq. 4)."""

    coef: float = 0.001

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return k3(logprobs, ref_logprobs)
