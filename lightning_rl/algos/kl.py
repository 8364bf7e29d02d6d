"""Limits on the update: ratios of probabilities, KL penalties, entropy bonuses."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from torch import Tensor

from lightning_rl.algos.schedules import FAR, Schedule, schedule_of
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite

LARGEST_LOG_RATIO = 20.0
"""Bound of a log ratio, in nats: exp(20) is 5e8, beyond any meaning; exp(89) overflows."""


def ratios(log_ratio: Tensor) -> Tensor:
    """Exponentiate log ratios (M,), clamped to ±20 as in verl; clamped ones have no gradient."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Sum of ``values`` (M,) over the tokens of each token's own rollout, shape (M,)."""
    rows, inverse = row.unique(return_inverse=True)
    return values.new_zeros(len(rows)).index_add(0, inverse, values)[inverse]


def row_means(values: Tensor, row: Tensor) -> Tensor:
    """Mean of ``values`` (M,) over the tokens of each token's own rollout, shape (M,)."""
    _, inverse, counts = row.unique(return_inverse=True, return_counts=True)
    return row_sums(values, row) / counts[inverse]


# Schulman 2020, "Approximating KL divergence"; d = log p_ref - log p, all shapes (M,).


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative: -d."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased, low variance: d^2 / 2. On-policy its gradient is an unbiased estimate of the KL's."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: exp(d) - d - 1, with d capped at 20."""
    # From above only, where exp grows out of hand: far below 0, d pulls back with slope 1.
    d = (ref_logprobs - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return d.expm1() - d


def check_target_kl(target_kl: float | None, **passes: int) -> None:
    """Refuse a ``target_kl`` that is not positive, or that has no further pass to skip.

    Raises:
        ConfigError: names it, and the argument that sets the number of passes.
    """
    require_finite(target_kl=target_kl)
    for name, count in passes.items():
        if target_kl is not None and (target_kl <= 0 or count < 2):
            raise ConfigError(
                f"target_kl={target_kl}, {name}={count}: it ends the passes over a batch early, so "
                f"it must be > 0 and {name} >= 2; else leave target_kl out"
            )


def beyond_target(target_kl: float, of_pass: Mapping[str, float]) -> bool:
    """Return True if a pass over a batch moved a policy by more than ``target_kl`` nats per token.

    Further passes are then skipped, as in OpenAI's Spinning Up and CleanRL. The mean of
    ``policy/kl_old`` over the pass is compared; for several policies, the largest. A pass that no
    policy learned from, as where no reward differs from others or a critic warms up, moved none.

    Raises:
        ConfigError: if the loss does not measure it.
    """
    if not any(name.startswith("policy/") and name.endswith("/loss") for name in of_pass):
        return False
    moved = [value for name, value in of_pass.items() if name.endswith("/kl_old")]
    if not moved:
        raise ConfigError(
            f"target_kl={target_kl} is compared with kl_old, which this loss does not measure; add "
            "algos.losses.divergence to its metrics, or drop target_kl"
        )
    return max(moved) > target_kl


@configurable
class KLPenalty(ABC):
    """A KL estimate per token, times a coefficient; in the loss (``kl``) or in the reward.

    Args:
        coef: a positive number, or a :class:`Schedule` such as ``AdaptiveCoefficient``.

    Raises:
        ConfigError: unless it is positive at first (leave the penalty out instead: ``kl: null``),
            and never negative.
    """

    def __init__(self, coef: float | Schedule = 0.001) -> None:
        self.coef = schedule_of(coef, "kl coef", measured="KL")
        first, last = self.coef.at(0), self.coef.at(FAR)
        if first <= 0 or last < 0:
            bad = first if first <= 0 else last
            raise ConfigError(f"kl coef={bad} must be > 0; for no KL penalty set kl: null")

    @abstractmethod
    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return the KL estimate per token (M,), without the coefficient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient's state."""
        return self.coef.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.coef.load_state_dict(state)


class K1Penalty(KLPenalty):
    """Estimator k1; the usual one in the reward (as a loss its gradient has mean zero)."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return k1(logprobs, ref_logprobs)


class K2Penalty(KLPenalty):
    """Estimator k2; as a loss, its gradient is that of the KL."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return k2(logprobs, ref_logprobs)


@configurable
class K3Penalty(KLPenalty):
    """Estimator k3: GRPO's penalty in the loss (Shao et al. 2024, DeepSeekMath, eq. 4).

    Args:
        cap: maximum of a token's estimate, beyond which its gradient is zero; None for no cap.
            verl uses 10, which a token reaches at 2.6 nats.

    Raises:
        ConfigError: unless ``cap`` is positive, and finite.
    """

    def __init__(self, coef: float | Schedule = 0.001, cap: float | None = None) -> None:
        super().__init__(coef)
        require_finite(cap=cap)
        if cap is not None and cap <= 0:
            raise ConfigError(f"K3Penalty(cap={cap}) must be > 0; null for none")
        self.cap = cap

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return k3(logprobs, ref_logprobs).clamp(max=self.cap or torch.inf)


@configurable
@dataclass(frozen=True)
class EntropyBonus:
    """Adds ``coef`` times the entropy per token (nats) to the objective; may be negative.

    Args:
        coef: a number, or a :class:`Schedule` such as ``LinearSchedule`` or ``AdaptiveEntropy``.

    Raises:
        ConfigError: for a number that is not finite.
    """

    coef: float | Schedule = 0.001
    schedule: Schedule = field(init=False, repr=False, compare=False)
    """The coefficient, as a schedule."""

    def __post_init__(self) -> None:
        schedule = schedule_of(self.coef, "entropy.coef", measured="entropy")
        object.__setattr__(self, "schedule", schedule)

    def at(self, iteration: int) -> float:
        """Return the coefficient in an iteration."""
        return self.schedule.at(iteration)


# The parser takes a subclass of a dataclass only if it is told to.
set_parsing_settings(subclasses_enabled=[EntropyBonus])
