"""The loss of a pack: policy loss, correction, KL, entropy and critic put together, per token."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.correction import Correction
from lightning_rl.algos.entropy import EntropyBonus
from lightning_rl.algos.kl import KLPenalty
from lightning_rl.algos.losses import Metrics, PolicyLoss, ValueLoss
from lightning_rl.data.packing import token_rows
from lightning_rl.models.policy import Scores


def loss_tokens(pack: TensorDict, scores: Scores) -> TensorDict:
    """The M tokens of a pack that ``scores`` are of, with what losses want to know of each."""
    tokens = pack["tokens"][scores.live]
    tokens["row"] = token_rows(pack)[scores.live]
    tokens["expert"] = pack["rollouts", "expert"][tokens["row"]]
    if "old_logprobs" not in tokens:  # one update per batch: the current policy is the old one
        tokens["old_logprobs"] = scores.logprobs.detach()
    return tokens


@dataclass(frozen=True)
class Objective:
    """What is minimised; each part but the policy loss may be missing."""

    loss: PolicyLoss
    correction: Correction | None = None
    kl: KLPenalty | None = None
    entropy: EntropyBonus | None = None
    value_loss: ValueLoss | None = None
    value_warmup_iterations: int = 0

    @property
    def advantage_moves_alone(self) -> bool:
        """Nothing but an advantage gives a sampled token a gradient."""
        others = (self.kl, self.entropy, self.value_loss)
        return self.loss.zero_at_zero_advantage and others == (None, None, None)

    def __call__(
        self, scores: Scores, tokens: TensorDict, iteration: int, all_sampled: bool = False
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics per token, (M,) each, of the M ``tokens`` that ``scores`` are of.

        ``all_sampled``: it is known that none is an expert's, for which a GPU's host would wait.
        """
        metrics: Metrics = {"policy/entropy": scores.entropy}
        sampled = slice(None) if all_sampled else ~tokens["expert"]
        gap = (tokens["old_logprobs"] - tokens["rollout_logprobs"])[sampled].abs()
        metrics |= {"rollout/logprob_gap_mean": gap, "rollout/logprob_gap_max": gap}
        total = torch.zeros_like(scores.logprobs)
        if iteration >= self.value_warmup_iterations:
            total = self._policy_part(scores, tokens, iteration, sampled, metrics)
        if self.value_loss is not None and scores.values is not None:
            value_loss, extra = self.value_loss(scores.values, tokens)
            total = total + value_loss
            metrics |= {f"value/{name}": value for name, value in extra.items()}
        return total, metrics

    def _policy_part(
        self,
        scores: Scores,
        tokens: TensorDict,
        iteration: int,
        sampled: Tensor | slice,
        metrics: Metrics,
    ) -> Tensor:
        ours = ~tokens["expert"]
        loss, extra = self.loss(scores.logprobs, tokens)
        metrics |= {f"policy/{name}": value for name, value in extra.items()}
        if self.correction is not None:
            weights, extra = self.correction(tokens)
            # No engine wrote the expert's tokens: there is nothing to correct.
            loss = torch.where(tokens["expert"], 1.0, weights) * loss
            metrics |= {f"correction/{name}": value for name, value in extra.items()}
        metrics["policy/loss"] = loss
        if self.kl is not None:
            penalty = self.kl(scores.logprobs, tokens["ref_logprobs"]) * ours
            loss = loss + self.kl.coef * penalty
            metrics["policy/kl_ref"] = penalty[sampled]
        if self.entropy is not None:
            loss = loss - self.entropy.at(iteration) * scores.entropy * ours
        return loss
