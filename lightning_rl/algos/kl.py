"""Holds on the update: ratios of probabilities, KL penalties, entropy bonuses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite

LARGEST_LOG_RATIO = 20.0
"""In nats. exp(20) is 5e8: no ratio beyond it means anything, and exp(89) is infinite."""


def ratios(log_ratio: Tensor) -> Tensor:
    """exp of log ratios (M,), taken within ±20, as verl does; no gradient comes from beyond it."""
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
    """Biased, low variance: d^2 / 2. Its gradient is an unbiased one of the KL on-policy."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: exp(d) - d - 1, with d taken at no more than 20."""
    # From above only, where exp grows out of hand: far below 0, d pulls back with slope 1.
    d = (ref_logprobs - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return d.expm1() - d


def check_target_kl(target_kl: float | None, **passes: int) -> None:
    """Refuse a target that is none, or that no pass could be left out for.

    Raises:
        ConfigError: naming it, and the argument that holds the number of passes.
    """
    require_finite(target_kl=target_kl)
    for name, count in passes.items():
        if target_kl is not None and (target_kl <= 0 or count < 2):
            raise ConfigError(
                f"target_kl={target_kl}, {name}={count}: it ends the passes over a batch early, so "
                f"it must be > 0 and {name} >= 2; else leave target_kl out"
            )


def beyond_target(target_kl: float, of_pass: Mapping[str, float]) -> bool:
    """Whether a pass over a batch took a policy further than ``target_kl``, in nats per token.

    Further passes are then left out, as in OpenAI's Spinning Up and CleanRL. What is compared is
    the mean of ``policy/kl_old`` over the pass; of several policies, the largest.

    Raises:
        ConfigError: if the loss does not measure it.
    """
    if not of_pass:  # nothing was left to train on
        return False
    moved = [value for name, value in of_pass.items() if name.endswith("/kl_old")]
    if not moved:
        raise ConfigError(
            f"target_kl={target_kl} is compared with kl_old, which this loss does not measure; add "
            "algos.losses.divergence to its metrics, or drop target_kl"
        )
    return max(moved) > target_kl


@configurable
class Coefficient:
    """A weight that may follow what it weighs; its value is part of a checkpoint.

    Raises:
        ConfigError: unless positive (leave the penalty out instead: ``kl: null``).
    """

    def __init__(self, value: float) -> None:
        require_finite(**{"kl coef": value})
        if value <= 0:
            raise ConfigError(f"kl coef={value} must be > 0; for no KL penalty set kl: null")
        self.value = value

    def update(self, measured: float) -> None:
        """Called once per iteration with the mean of what the coefficient weighs."""

    def state_dict(self) -> dict[str, Any]:
        """The present value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.value = state["value"]


@configurable
class AdaptiveCoefficient(Coefficient):
    """Steers the measured KL to ``target`` (Ziegler et al. 2019, section 2.2).

    value *= 1 + gain clip(kl / target - 1, -0.2, 0.2), once per iteration.

    Args:
        value: to start with.
        target: KL per token, in nats.
        gain: how fast it reacts; at most 20 % per iteration at 1.
    """

    def __init__(self, value: float = 0.01, target: float = 0.01, gain: float = 0.5) -> None:
        super().__init__(value)
        require_finite(target=target, gain=gain)
        if target <= 0 or gain <= 0:
            raise ConfigError(
                f"AdaptiveCoefficient(target={target}, gain={gain}): both must be > 0"
            )
        self.target = target
        self.gain = gain

    def update(self, measured: float) -> None:
        if not math.isfinite(measured):  # says nothing of where the policy is
            return
        error = min(0.2, max(-0.2, measured / self.target - 1))
        self.value *= 1 + self.gain * error


@configurable
class KLPenalty(ABC):
    """A KL estimate per token, times a coefficient; in the loss (``kl``) or in the reward.

    Args:
        coef: a number, or a :class:`Coefficient` such as ``AdaptiveCoefficient``.
    """

    def __init__(self, coef: float | Coefficient = 0.001) -> None:
        self.coefficient = coef if isinstance(coef, Coefficient) else Coefficient(coef)

    @property
    def coef(self) -> float:
        """The coefficient's present value."""
        return self.coefficient.value

    @abstractmethod
    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """KL estimate per token (M,), without the coefficient."""

    def state_dict(self) -> dict[str, Any]:
        """The coefficient's state."""
        return self.coefficient.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.coefficient.load_state_dict(state)


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
        cap: None, or what a token's estimate is taken at, at most: no gradient comes from beyond.
            10 is verl's, which a token reaches at 2.6 nats.

    Raises:
        ConfigError: unless ``cap`` is positive, and finite.
    """

    def __init__(self, coef: float | Coefficient = 0.001, cap: float | None = None) -> None:
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

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    coef: float = 0.001

    def __post_init__(self) -> None:
        require_finite(**{"entropy.coef": self.coef})

    def at(self, iteration: int) -> float:
        """The coefficient in an iteration; override for another schedule."""
        return self.coef


# The parser takes a subclass of a dataclass only where it is told to.
set_parsing_settings(subclasses_enabled=[EntropyBonus])


@configurable
@dataclass(frozen=True)
class LinearEntropyBonus(EntropyBonus):
    """From ``coef`` to ``final`` over ``iterations`` iterations, then ``final``.

    Raises:
        ConfigError: if ``iterations`` is less than 1, or ``final`` is not finite.
    """

    final: float = 0.0
    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite(**{"entropy.final": self.final})
        if self.iterations < 1:
            raise ConfigError(f"LinearEntropyBonus(iterations={self.iterations}) must be >= 1")

    def at(self, iteration: int) -> float:
        done = min(1.0, iteration / self.iterations)
        return self.coef + (self.final - self.coef) * done
