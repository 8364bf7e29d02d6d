"""Policy losses that treat the ratio otherwise than PPO does, and one that has none."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, check_clip, divergence
from lightning_rl.algos.ratios import ratios, row_means
from lightning_rl.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite


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
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    zero_at_zero_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        log_ratio = logprobs.detach() - tokens["old_logprobs"]
        s = ratios(row_means(log_ratio, tokens["row"]))
        s = s * (logprobs - logprobs.detach()).exp()  # value s, gradient s d log p
        unclipped = s * tokens["advantages"]
        clipped = s.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens["advantages"]
        metrics = divergence(logprobs, tokens) | {"clip_frac": (clipped < unclipped).float()}
        return -torch.minimum(unclipped, clipped), metrics


@configurable
@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """-sg(clip(w, 1 - low, 1 + high)) A log p (MiniMax-M1, 2025, eqs. 4-5).

    The clip bounds a weight, so no token loses its gradient. ``clip_low`` 1 or more means no lower
    bound, as the paper has it.

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
    """Soft adaptive gate in place of the clip (Gao et al. 2025, SAPO, arXiv 2511.20347).

    -f(w) A with f(w) = 4 / tau sigmoid(tau (w - 1)): slope 1 at w = 1, falling smoothly on both
    sides. Negative advantages get the steeper gate.

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
    """Reinforcement and imitation in one batch: -coef log p on expert tokens, ``loss`` elsewhere.

    Expert completions come from ``data.expert_prompts`` (as in Trinity-RFT's MIX, and in the
    off-policy guidance of LUFFY, Yan et al. 2025, without its reshaping).

    Args:
        loss: for sampled tokens.
        coef: weight of an expert token beside a sampled one.

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    loss: PolicyLoss = PPOClip()
    coef: float = 0.1

    def __post_init__(self) -> None:
        require_finite(coef=self.coef)

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """As ``loss`` has it, which sees the sampled tokens."""
        return self.loss.zero_at_zero_advantage

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        expert = tokens["expert"]
        loss, metrics = self.loss(logprobs, tokens)
        metrics = {name: value[~expert] for name, value in metrics.items()}
        metrics["expert_nll"] = -logprobs.detach()[expert]
        return torch.where(expert, -self.coef * logprobs, loss), metrics
