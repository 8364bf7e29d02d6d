"""Policy losses that bound an update by other measures than PPO's clip of each token's ratio."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.kl import LARGEST_LOG_RATIO, ratios, row_means, row_sums
from lightning_rl.algos.losses import (
    Metrics,
    PolicyLoss,
    PPOClip,
    divergence,
    sequence_ratios,
)
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite


@configurable
@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-w A, without tokens whose probability has moved too far (Qi et al. 2026, arXiv 2602.04879).

    With w = p / p_old, a token has no policy gradient if A > 0 and p - p_old > ``high``, or if
    A < 0 and p - p_old < -``low``: that is the paper's binary total variation. Unlike a bound on
    the ratio, it lets a rare token become several times as likely, and holds a likely one. Each
    token also costs ``square`` (log w)^2 (Kimi K2.5, arXiv 2602.02276). These are prime-rl's
    default loss and its defaults.

    Args:
        low: largest decrease of a token's probability.
        high: largest increase of a token's probability.
        square: coefficient of the squared log ratio; 0 for none.

    Raises:
        ConfigError: unless 0 < low <= 1, 0 < high <= 1 and square >= 0.
    """

    low: float = 0.2
    high: float = 0.2
    square: float = 1e-3

    def __post_init__(self) -> None:
        require_finite(square=self.square)
        require_at_least(0, square=self.square)
        if not (0 < self.low <= 1 and 0 < self.high <= 1):
            raise ConfigError(
                f"DPPO(low={self.low}, high={self.high}): both are differences of probabilities, "
                "and must be > 0 and <= 1"
            )

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """False if the squared log ratio is part of the loss."""
        return self.square == 0

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        old, advantages = tokens["old_logprobs"], tokens["advantages"]
        moved = logprobs.detach().exp() - old.exp()
        cut = ((advantages > 0) & (moved > self.high)) | ((advantages < 0) & (moved < -self.low))
        loss = torch.where(cut, 0.0, -ratios(logprobs - old) * advantages)
        loss = loss + self.square * (logprobs - old) ** 2
        return loss, divergence(logprobs, tokens) | {"clip_frac": cut.float()}


@configurable
@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """Geometric mean of clipped ratios (Zhao et al. 2025, GMPO, arXiv 2507.20673, eq. 4).

    A rollout's ratio is s = exp(mean over its tokens of c), where c is the log ratio
    log p - log p_old, clamped to [-``clip_low``, ``clip_high``] on the side on which PPO clips.
    Every token gets the value -s A, and its own share of the gradient. Use it with
    ``SequenceMean``; the objective is the paper's if all tokens of a rollout have the same
    advantage. verl calls it ``geo_mean``.

    Args:
        clip_low: largest decrease of a token's log ratio, in nats.
        clip_high: largest increase of a token's log ratio, in nats.

    Raises:
        ConfigError: unless both bounds are positive and finite.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(clip_low=self.clip_low, clip_high=self.clip_high)
        if self.clip_low <= 0 or self.clip_high <= 0:
            raise ConfigError(
                f"GMPO(clip_low={self.clip_low}, clip_high={self.clip_high}): both bound a log "
                "ratio, and must be > 0"
            )

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        advantages = tokens["advantages"]
        log_ratio = logprobs - tokens["old_logprobs"]
        clamped = log_ratio.clamp(-self.clip_low, self.clip_high)
        # The smaller of both objectives, as in PPO: of a negative advantage, the larger log ratio.
        kept = torch.where(
            advantages >= 0, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped)
        )
        cut = (kept != log_ratio).float()
        loss = -sequence_ratios(kept, tokens["row"]) * advantages
        return loss, divergence(logprobs, tokens) | {"clip_frac": cut}


@configurable
@dataclass(frozen=True)
class VESPO(PolicyLoss):
    """-phi(w) A log p with a smooth weight of the sequence (VESPO 2026, arXiv 2602.10693).

    w is the product of a rollout's token ratios p / p_old, and phi(w) = w^k exp(rate (1 - w)),
    without gradient, so that phi(1) = 1 and phi falls on both sides. Its log is computed from log w
    in [log 1e-8, 20]. Use it with ``TokenMean``. These are TRL's formula and defaults.

    Args:
        k_positive: exponent where A >= 0.
        rate_positive: decay where A >= 0.
        k_negative: exponent where A < 0.
        rate_negative: decay where A < 0.

    Raises:
        ConfigError: for a negative value, or one that is not finite.
    """

    k_positive: float = 2.0
    rate_positive: float = 3.0
    k_negative: float = 3.0
    rate_negative: float = 2.0
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(**vars(self))
        require_at_least(0, **vars(self))

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        advantages, old = tokens["advantages"], tokens["old_logprobs"]
        gap = (logprobs.detach() - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        log_w = row_sums(gap, tokens["row"]).clamp(_SMALLEST_LOG_WEIGHT, LARGEST_LOG_RATIO)
        gains = advantages >= 0
        k = torch.where(gains, self.k_positive, self.k_negative)
        rate = torch.where(gains, self.rate_positive, self.rate_negative)
        phi = (rate + k * log_w - rate * log_w.exp()).exp()
        return -phi * advantages * logprobs, divergence(logprobs, tokens) | {"sequence_weight": phi}


_SMALLEST_LOG_WEIGHT = -18.420680743952367  # log 1e-8


@configurable
@dataclass(frozen=True)
class TOPR(PolicyLoss):
    """-c A log p: good rollouts are imitated, bad ones taper off (Le Roux et al. 2025, TOPR,
    arXiv 2503.14286).

    With w the product of a rollout's token ratios p / p_old, the weight c, without gradient, is 1
    where A >= 0, and min(w, ``bound``) where A < 0: what has become unlikely is pushed no further,
    so that data may be old. Use it with ``TokenSum``, as the paper sums a rollout's tokens.

    Args:
        bound: the largest weight of a negative advantage.

    Raises:
        ConfigError: unless ``bound`` is positive and finite.
    """

    bound: float = 1.0
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(bound=self.bound)
        if self.bound <= 0:
            raise ConfigError(f"TOPR(bound={self.bound}): it bounds a ratio, and must be > 0")

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        advantages = tokens["advantages"]
        log_w = row_sums(logprobs.detach() - tokens["old_logprobs"], tokens["row"])
        tapered = log_w.clamp(max=math.log(self.bound)).exp()
        weight = torch.where(advantages < 0, tapered, 1.0)
        return -weight * advantages * logprobs, divergence(logprobs, tokens) | {"taper": weight}


@configurable
@dataclass(frozen=True)
class OffPolicyMask(PolicyLoss):
    """Leaves out bad rollouts that have become unlikely (DeepSeek-V3.2 2025, arXiv 2512.02556).

    A token's loss is 0 if its advantage is negative and the mean over its rollout of
    log p_engine - log p exceeds ``threshold``: the policy has moved away from it, and pushing
    further teaches nothing. TRL calls it ``off_policy_mask_threshold``.

    Args:
        loss: the loss of all other tokens.
        threshold: the largest mean, in nats per token.

    Raises:
        ConfigError: unless ``threshold`` is finite.
    """

    loss: PolicyLoss = PPOClip()
    threshold: float = 0.1

    def __post_init__(self) -> None:
        require_finite(threshold=self.threshold)

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """The value of ``loss``."""
        return self.loss.zero_at_zero_advantage

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        loss, metrics = self.loss(logprobs, tokens)
        gap = row_means(tokens["rollout_logprobs"] - logprobs.detach(), tokens["row"])
        skipped = (tokens["advantages"] < 0) & (gap > self.threshold)
        return loss.masked_fill(skipped, 0.0), metrics | {"masked_share": skipped.float()}
