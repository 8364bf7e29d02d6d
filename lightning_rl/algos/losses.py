"""Policy and value losses, per token; ``Aggregation`` says how tokens are averaged.

A loss sees the M model tokens of a micro-batch: ``logprobs`` (M,) under the current policy and
``tokens``, a TensorDict [M] with ``old_logprobs``, ``rollout_logprobs``, ``advantages``, ``row``
(which rollout a token belongs to), ``demonstration`` (True if it was given, not sampled) and, where
computed, ``ref_logprobs``, ``values``, ``returns``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.kl import k3, ratios, row_means
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite

Metrics = dict[str, Tensor]
"""Per-token tensors (M,), without gradient; the module averages them over all live tokens."""


class PolicyLoss(ABC):
    """Maps current logprobs to a loss per token.

    ``zero_at_zero_advantage``: the loss of a sampled token whose advantage is zero is 0, whatever
    its logprobs. The update then omits rollouts whose advantages are all zero, which is exact.
    """

    zero_at_zero_advantage: ClassVar[bool] = False  # by default nothing is left out
    needs_teacher: ClassVar[bool] = False
    """True if a teacher has to tell its likeliest tokens, which the policy then scores, too."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        """Return the loss (M,) and per-token metrics."""


def divergence(logprobs: Tensor, tokens: TensorDict) -> Metrics:
    """Return ``kl_old`` (M,), the k3 estimate of how far the policy has moved from the old one."""
    return {"kl_old": k3(tokens["old_logprobs"], logprobs.detach())}


def check_clip(low: float, high: float, hint: str = "") -> None:
    """Refuse impossible bounds of a clipped ratio.

    Raises:
        ConfigError: names both and their bounds, followed by ``hint``.
    """
    require_finite(clip_low=low, clip_high=high)
    if not 0 < low < 1 or high <= 0:
        raise ConfigError(
            f"clip_low={low}, clip_high={high}: need 0 < clip_low < 1 and clip_high > 0{hint}"
        )


def check_dual_clip(dual: float | None) -> None:
    """Refuse an impossible dual clip bound.

    Raises:
        ConfigError: names it.
    """
    require_finite(dual_clip=dual)
    if dual is not None and dual <= 1:
        raise ConfigError(f"dual_clip={dual} must be > 1; 3 is usual, null for none")


def check_step_loss(what: str, loss: Callable[..., Any]) -> None:
    """Try a loss on a single step, and refuse it if it reads any other column.

    Raises:
        ConfigError: names the part and the column.
    """
    one = torch.zeros(1, device="cpu")
    step = {"old_logprobs": one, "advantages": one, "values": one, "returns": one, "weights": one}
    try:
        loss(one, step)  # losses read it by name alone
    except KeyError as error:
        raise ConfigError(
            f"{what} reads the column {error}, which a single step does not have; use "
            "PPOClip, Surrogate, Reinforce, CISPO or SAPO"
        ) from error


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, -min(w A, clip(w, 1 - low, 1 + high) A) with w = exp(logp - old logp).

    All arguments and both results have shape (M,); the second is True where the clip removes the
    gradient (Schulman et al. 2017, PPO, eq. 7; asymmetric bounds from DAPO, Yu et al. 2025).
    ``dual`` bounds the loss of a negative advantage at -dual A, so that a large ratio cannot blow
    it up (dual-clip PPO, Ye et al. 2020, eq. 8).
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape and logprobs.ndim == 1
    return clipped_surrogate(ratios(logprobs - old_logprobs), advantages, low, high, dual)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Apply :func:`ppo_clip` to a given ratio (M,), such as a sequence's."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    objective, cut = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual is not None:
        floor = dual * advantages
        below = (advantages < 0) & (objective < floor)
        objective, cut = torch.where(below, floor, objective), cut | below
    return -objective, cut


def sequence_ratios(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the geometric mean of each rollout's ratios, (M,), for log ratios (M,) and rows (M,).

    Every token has its rollout's value, and its own share of the gradient: that of its log ratio
    times the value (Zheng et al. 2025, GSPO-token, eq. 13).
    """
    value = log_ratio.detach()
    return ratios(row_means(value, row)) * (log_ratio - value).exp()


@configurable
@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7).

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher (Yu et al. 2025).

    Args:
        clip_low: largest decrease of the ratio w below 1.
        clip_high: largest increase of the ratio w above 1.
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
        check_dual_clip(self.dual_clip)
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
        coef: weight relative to the policy loss.
        clip: how far values may move from the rollout's before the larger error counts; None: no
            clip.

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


@dataclass(frozen=True)
class Surrogate(PolicyLoss):
    """-w A without a clip (Schulman et al. 2015, TRPO, eq. 14); add another bound on the update."""

    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        ratio = ratios(logprobs - tokens["old_logprobs"])
        return -ratio * tokens["advantages"], divergence(logprobs, tokens)


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """-A log p (Williams 1992): the policy gradient, exact for the first update of a batch."""

    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        return -tokens["advantages"] * logprobs, divergence(logprobs, tokens)


@configurable
@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """Clipped surrogate of the sequence's ratio (Zheng et al. 2025, GSPO, eqs. 5, 7 and 13).

    s = exp(mean over the rollout's tokens of log p - log p_old); every token gets the value of
    -min(s A, clip(s, 1 - low, 1 + high) A) and, as in GSPO-token, its own share of the gradient.
    Use it with ``SequenceMean``. Bounds are far narrower than PPO's, since s is a geometric mean.

    Args:
        clip_low: largest decrease of the sequence's ratio s below 1.
        clip_high: largest increase of the sequence's ratio s above 1.
        dual_clip: bound on the loss of negative advantages, as in :class:`PPOClip`; None for none.

    Raises:
        ConfigError: for bounds outside of 0 < clip_low < 1, clip_high > 0, dual_clip > 1.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_dual_clip(self.dual_clip)
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        s = sequence_ratios(logprobs - tokens["old_logprobs"], tokens["row"])
        bounds = (self.clip_low, self.clip_high, self.dual_clip)
        loss, cut = clipped_surrogate(s, tokens["advantages"], *bounds)
        return loss, divergence(logprobs, tokens) | {"clip_frac": cut.float()}


@configurable
@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """-sg(clip(w, 1 - low, 1 + high)) A log p (MiniMax-M1, 2025, eqs. 4-5).

    The clip bounds a weight, so no token loses its gradient.

    Args:
        clip_low: largest decrease of the weight w below 1; 1 or more means no lower bound, as in
            the paper.
        clip_high: largest increase of the weight w above 1.

    Raises:
        ConfigError: unless both bounds are positive.
    """

    clip_low: float = 1.0
    clip_high: float = 2.0
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(clip_low=self.clip_low, clip_high=self.clip_high)
        if self.clip_low <= 0 or self.clip_high <= 0:
            raise ConfigError(
                f"CISPO(clip_low={self.clip_low}, clip_high={self.clip_high}): both must be > 0"
            )

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        ratio = ratios(logprobs.detach() - tokens["old_logprobs"])
        weight = ratio.clamp(max(0.0, 1 - self.clip_low), 1 + self.clip_high)
        metrics = divergence(logprobs, tokens) | {"clip_frac": (weight != ratio).float()}
        return -weight * tokens["advantages"] * logprobs, metrics


@configurable
@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Soft adaptive gate instead of the clip (Gao et al. 2025, SAPO, arXiv 2511.20347).

    -f(w) A with f(w) = 4 / tau sigmoid(tau (w - 1)): slope 1 at w = 1, falling smoothly on both
    sides. Negative advantages get the steeper gate.

    Args:
        tau_positive: temperature of the gate where A > 0; the larger, the steeper it falls.
        tau_negative: temperature of the gate where A <= 0.

    Raises:
        ConfigError: unless both temperatures are positive.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(tau_positive=self.tau_positive, tau_negative=self.tau_negative)
        if self.tau_positive <= 0 or self.tau_negative <= 0:
            raise ConfigError(
                f"SAPO(tau_positive={self.tau_positive}, tau_negative={self.tau_negative}): both "
                "must be > 0"
            )

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        advantages = tokens["advantages"]
        ratio = ratios(logprobs - tokens["old_logprobs"])
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1))
        metrics = divergence(logprobs, tokens) | {"gate": 4 * (gate * (1 - gate)).detach()}
        return -4 / tau * gate * advantages, metrics


@configurable
@dataclass(frozen=True)
class SFTMix(PolicyLoss):
    """Reinforcement and imitation in one batch: -coef log p of demonstrations, ``loss`` elsewhere.

    They come from ``data.demonstrations`` (as in Trinity-RFT's MIX, and in the
    off-policy guidance of LUFFY, Yan et al. 2025, without its reshaping).

    Args:
        loss: loss of sampled tokens.
        coef: weight of a demonstration's token relative to a sampled one.

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    loss: PolicyLoss = PPOClip()
    coef: float = 0.1

    def __post_init__(self) -> None:
        require_finite(coef=self.coef)

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """The value of ``loss``, which sees the sampled tokens."""
        return self.loss.zero_at_zero_advantage

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        given = tokens["demonstration"]
        loss, metrics = self.loss(logprobs, tokens)
        metrics = {name: value[~given] for name, value in metrics.items()}
        metrics["demonstration_nll"] = -logprobs.detach()[given]
        return torch.where(given, -self.coef * logprobs, loss), metrics
