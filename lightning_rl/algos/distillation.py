"""Learning from a teacher's distribution over the tokens that the student has written."""

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
from lightning_rl.data.teacher_logprobs import UNKNOWN
from lightning_rl.errors import ConfigError, require_finite

LEAST_SHARE = 1e-6
"""Least probability of all tokens together that are not among the teacher's likeliest."""
NEVER = -50.0
"""The logprob of a place among the likeliest that is not filled: e^-50 adds nothing."""


@configurable
@dataclass(frozen=True)
class Distillation(Advantage):
    """A[t] = coef (log q[t] - log p[t]): a teacher's logprob of token t less that of its writer.

    The policy gradient with it is that of minus the reverse KL from student to teacher, on the
    student's own tokens (Agarwal et al. 2024, GKD, arXiv 2306.13649, section 3; "On-policy
    distillation", Thinking Machines 2025). A token gets credit for itself alone. The difference is
    clamped to ±20 nats. One of the rewards has to be a ``ModelTeacher`` or ``ServedTeacher``; where
    it has not looked, the term is 0, as for a given expert's tokens.

    Args:
        coef: weight of the teacher's term.
        beside: advantage from the rewards, which is added; None: the teacher's term alone.

    Raises:
        ConfigError: if ``coef`` is not finite.
    """

    coef: float = 1.0
    beside: GroupAdvantage | None = None
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(coef=self.coef)

    @property
    def takes_kl_reward(self) -> bool:  # type: ignore[override]
        """True if ``beside`` does; without it, rewards have no part in the advantage."""
        return self.beside is not None and self.beside.takes_kl_reward

    @property
    def per_group(self) -> bool:
        return True

    @property
    def min_group_size(self) -> int:
        return 1 if self.beside is None else self.beside.min_group_size

    def __call__(self, batch: TensorDict) -> TensorDict:
        tokens = batch["tokens"]
        written = tokens["rollout_logprobs"]
        advantages = torch.zeros_like(written)
        if self.beside is not None:
            advantages = self.beside(batch)["tokens", "advantages"]
        if "teacher_logprobs" in tokens:
            gap = tokens["teacher_logprobs"].to(written.dtype) - written
            sampled = tokens["loss_mask"] & ~batch["rollouts", "expert"][token_rows(batch)]
            term = self.coef * gap.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            advantages = advantages + term.where(sampled & ~gap.isnan(), 0.0)
        tokens["advantages"] = advantages
        return batch


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
    """Append to logprobs (M, K) of some tokens that of all others together: (M, K + 1)."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_SHARE)
    return torch.cat([logprobs, rest.log()], -1)


@configurable
@dataclass(frozen=True)
class TeacherDivergence(PolicyLoss):
    """The divergence of student and teacher over the teacher's likeliest tokens, as a loss.

    It is the generalised Jensen-Shannon divergence (:func:`generalized_jsd`; Agarwal et al. 2024,
    GKD, arXiv 2306.13649, eq. 1) of two distributions over K + 1 outcomes: the teacher's ``top_k``
    likeliest tokens, and all others as one. So it is 0 only where they agree on these, and never
    more than the divergence over the whole vocabulary. One of the rewards has to be a teacher with
    ``top_k``; where it has not looked, the loss is 0. The policy has to sample from its whole
    distribution.

    Args:
        beta: 0: forward KL, which covers what the teacher would write; 1: reverse KL, which seeks
            its most likely texts; between: the generalised Jensen-Shannon divergence.
        coef: weight of the divergence.
        beside: loss that is added, which learns from rewards; None: the divergence alone.

    Raises:
        ConfigError: for a ``beta`` outside [0, 1], or if ``coef`` is not finite.
    """

    beta: float = 0.5
    coef: float = 1.0
    beside: PolicyLoss | None = None
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_finite(beta=self.beta, coef=self.coef)
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"TeacherDivergence(beta={self.beta}) must be in [0, 1]")

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        loss, metrics = logprobs * 0.0, divergence(logprobs, tokens)
        if self.beside is not None:
            loss, metrics = self.beside(logprobs, tokens)
        if "teacher_ids" not in tokens:
            return loss, metrics
        if "likeliest_logprobs" not in tokens:
            raise ConfigError(
                "TeacherDivergence has to be model.loss itself, or the policy does not score the "
                "teacher's likeliest tokens; give it the other loss as beside"
            )
        filled = tokens["teacher_ids"] != UNKNOWN
        teacher, student = (
            with_rest(tokens[name].to(logprobs.dtype).where(filled, NEVER))
            for name in ("teacher_top", "likeliest_logprobs")
        )
        apart = generalized_jsd(teacher, student, self.beta).where(filled.any(-1), 0.0)
        return loss + self.coef * apart, metrics | {"teacher_divergence": apart.detach()}
