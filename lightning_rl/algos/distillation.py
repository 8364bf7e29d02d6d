"""Learning from a teacher's distribution over the tokens that the student has written."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage, GroupAdvantage
from lightning_rl.algos.kl import LARGEST_LOG_RATIO
from lightning_rl.algos.losses import Metrics, PolicyLoss, divergence
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import token_rows
from lightning_rl.errors import ConfigError, require_finite

NEVER = -50.0
"""The logprob of a place among the likeliest that is not filled: e^-50 adds nothing."""


@configurable
@dataclass(frozen=True)
class Distillation(Advantage):
    """A[t] = coef (log q[t] - log p[t]): a teacher's logprob of token t less the policy's.

    The policy gradient with it is that of minus the reverse KL of each next-token distribution,
    from student to teacher, on texts that the student has written (Agarwal et al. 2024, GKD, arXiv
    2306.13649, section 3; "On-policy distillation", Thinking Machines 2025). A token gets credit
    for itself alone, not for those that follow it, so it is not the gradient of the KL of whole
    texts. p is the policy in the pass that is trained, without gradient, as in prime-rl and verl:
    in later passes over a batch, or on older rollouts, the difference from its writer would be
    that of another KL. The difference is clamped to ±20 nats. One of the rewards has to be a
    ``ModelTeacher`` or ``ServedTeacher``; where it has not looked, the term is 0, as for a given
    tokens of demonstrations.

    Args:
        coef: weight of the teacher's term.
        base_advantage: advantage from the rewards, which is added; None: the teacher's term alone.

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    coef: float = 1.0
    base_advantage: GroupAdvantage | None = None
    needs_teacher: ClassVar[bool] = True
    per_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(coef=self.coef)

    @property
    def takes_kl_reward(self) -> bool:  # type: ignore[override]
        """True if ``base_advantage`` does; without it, rewards have no part in the advantage."""
        return self.base_advantage is not None and self.base_advantage.takes_kl_reward

    @property
    def min_group_size(self) -> int:  # type: ignore[override]
        return 1 if self.base_advantage is None else self.base_advantage.min_group_size

    def __call__(self, batch: TensorDict) -> TensorDict:
        tokens = batch["tokens"]
        written = tokens["rollout_logprobs"]
        advantages = torch.zeros_like(written)
        if self.base_advantage is not None:
            advantages = self.base_advantage(batch)["tokens", "advantages"]
        sampled = tokens["loss_mask"] & ~batch["rollouts", "demonstration"][token_rows(batch)]
        tokens["advantages"] = advantages + self._term(written, tokens, sampled)
        return batch

    def at_present(self, logprobs: Tensor, tokens: TensorDict) -> Tensor:
        sampled = ~tokens["demonstration"]
        writers = self._term(tokens["rollout_logprobs"], tokens, sampled)
        return tokens["advantages"] - writers + self._term(logprobs, tokens, sampled)

    def _term(self, logprobs: Tensor, tokens: TensorDict, sampled: Tensor) -> Tensor:
        """Return the teacher's term, 0 except for ``sampled`` tokens that it has read."""
        if "teacher_logprobs" not in tokens:
            return torch.zeros_like(logprobs)
        gap = tokens["teacher_logprobs"].to(logprobs.dtype) - logprobs
        term = self.coef * gap.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return term.where(sampled & ~gap.isnan(), 0.0)


def generalized_jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return the divergence (M,) of two distributions given by logprobs (M, N).

    With m = beta p + (1 - beta) q of teacher p and student q, it is beta KL(p || m) + (1 - beta)
    KL(q || m); at beta = 0 the forward KL(p || q), and at 1 the reverse KL(q || p) (Agarwal et al.
    2024, GKD, arXiv 2306.13649, eq. 1).
    """
    assert teacher.shape == student.shape and teacher.ndim == 2
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    shares = teacher.new_tensor([beta, 1 - beta]).log()
    mixed = torch.logaddexp(teacher + shares[0], student + shares[1])
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return (of.exp() * (of - to)).sum(-1)


def with_rest(logprobs: Tensor) -> Tensor:
    """Append to logprobs (M, K) of some tokens that of all others together: (M, K + 1).

    With the logprob s of the K tokens together it is log(1 - exp s), as Maechler computes it (2012,
    "Accurately computing log(1 - exp(-|a|))"); and s is exact near 0, where one token has nearly
    all of the probability. The share of the others is at least 8 epsilon, about what rounding
    leaves of it: 1e-6 in float32.
    """
    first = logprobs.argmax(-1, keepdim=True)
    largest = logprobs.gather(-1, first)
    further = (logprobs - largest).exp().scatter(-1, first, 0.0).sum(-1, keepdim=True)
    together = (largest + further.log1p()).clamp(max=-8 * torch.finfo(logprobs.dtype).eps)
    small = together > -math.log(2)
    # The branch that is not taken must not make its gradient infinite.
    near, far = together.where(small, -1.0), together.where(~small, -1.0)
    rest = torch.where(small, (-near.expm1()).log(), (-far.exp()).log1p())
    return torch.cat([logprobs, rest], -1)


@configurable
@dataclass(frozen=True)
class TeacherDivergence(PolicyLoss):
    """The divergence of student and teacher over the teacher's likeliest tokens, as a loss.

    It is the generalised Jensen-Shannon divergence (:func:`generalized_jsd`; Agarwal et al. 2024,
    GKD, arXiv 2306.13649, eq. 1) of two distributions over K + 1 outcomes: the teacher's ``top_k``
    likeliest tokens, and all others as one. So it is 0 only where they agree on these, and never
    more than the divergence over the whole vocabulary. One of the rewards has to be a teacher with
    ``top_k``; where it has not looked, the loss is 0. The policy has to sample from its whole
    distribution: no top-k, top-p or min-p, no ``min_tokens`` and no penalties.

    Args:
        beta: 0: forward KL, which covers what the teacher would write; 1: reverse KL, which seeks
            its most likely texts; between: the generalised Jensen-Shannon divergence.
        coef: weight of the divergence.
        base_loss: loss that is added, which learns from rewards; None: the divergence alone.

    Raises:
        ConfigError: for a ``beta`` outside [0, 1], or if ``coef`` is not finite.
    """

    beta: float = 0.5
    coef: float = 1.0
    base_loss: PolicyLoss | None = None
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(beta=self.beta, coef=self.coef)
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"TeacherDivergence(beta={self.beta}) must be in [0, 1]")

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        loss, metrics = logprobs * 0.0, divergence(logprobs, tokens)
        if self.base_loss is not None:
            loss, metrics = self.base_loss(logprobs, tokens)
        if "teacher_ids" not in tokens:
            return loss, metrics
        if "likeliest_logprobs" not in tokens:
            raise ConfigError(
                "TeacherDivergence must be model.loss itself: only then does the policy score the "
                "teacher's likeliest tokens; pass the other loss as base_loss"
            )
        # A token that the policy lacks, of a larger vocabulary, is one of the others.
        filled = ~tokens["likeliest_logprobs"].isneginf()
        teacher, student = (
            with_rest(tokens[name].to(logprobs.dtype).where(filled, NEVER))
            for name in ("teacher_top", "likeliest_logprobs")
        )
        apart = generalized_jsd(teacher, student, self.beta).where(filled.any(-1), 0.0)
        return loss + self.coef * apart, metrics | {"teacher_divergence": apart.detach()}
