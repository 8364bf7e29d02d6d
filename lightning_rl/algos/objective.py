"""The loss of a micro-batch: the sum of its parts per token, and how tokens are averaged."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.correction import Correction
from lightning_rl.algos.experts import LoadBalance
from lightning_rl.algos.kl import EntropyBonus, KLPenalty
from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, ValueLoss
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import episode_rows, token_rows
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.models.policy import Scores
from lightning_rl.models.reference import Reference
from lightning_rl.run.processes.dist import all_sum, world_size


class Aggregation(ABC):
    """Weights (T,) of a minibatch's tokens, zero outside the loss mask."""

    per_group: ClassVar[bool] = False
    """True if the :meth:`weights` of a group do not depend on other groups."""

    @abstractmethod
    def weights(self, minibatch: TensorDict) -> Tensor:
        """Return weights (T,) up to a factor; calling the object divides by :meth:`total`."""

    def total(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        """Return this rank's share of the divisor; by default the sum of the weights."""
        return weights.sum()

    def __call__(self, minibatch: TensorDict) -> Tensor:
        weights = self.weights(minibatch)
        total = all_sum(self.total(minibatch, weights))
        return weights * world_size() / total.clamp(min=1e-12)

    def factor(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        """Return the factor by which calling the object multiplies these :meth:`weights`."""
        return world_size() / all_sum(self.total(minibatch, weights)).clamp(min=1e-12)


def _mask(minibatch: TensorDict) -> Tensor:
    tokens = minibatch["tokens"]
    return tokens["loss_mask"].to(tokens["rollout_logprobs"].dtype)


def _one_each(minibatch: TensorDict, numbers: Tensor) -> Tensor:
    """Share a weight of 1 equally among the tokens of the rows (R,) with the same number."""
    mask = _mask(minibatch)
    different, of_row = numbers.unique(return_inverse=True)
    of_token = of_row[token_rows(minibatch)]
    count = mask.new_zeros(len(different)).index_add(0, of_token, mask)
    return mask / count.clamp(min=1)[of_token]


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Every model token counts the same (DAPO, Yu et al. 2025, eq. 12)."""

    per_group: ClassVar[bool] = True

    def weights(self, minibatch: TensorDict) -> Tensor:
        return _mask(minibatch)


@configurable
@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Every rollout counts the same: the mean over rollouts of their token means (original GRPO).

    A rollout with several rows is averaged over the tokens of all of them; one with several roles,
    separately for each role.

    Args:
        all_rollouts: divide by the number of all rollouts, including those without tokens in the
            loss (``mask_truncated``), as TRL does; False: only by those with tokens in it.
    """

    per_group: ClassVar[bool] = True

    all_rollouts: bool = False

    def weights(self, minibatch: TensorDict) -> Tensor:
        return _one_each(minibatch, episode_rows(minibatch))

    def total(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        if not self.all_rollouts:
            return super().total(minibatch, weights)
        return weights.new_tensor(float(len(episode_rows(minibatch).unique())))


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """Every prompt counts the same: the mean over groups of their token means."""

    per_group: ClassVar[bool] = True

    def weights(self, minibatch: TensorDict) -> Tensor:
        return _one_each(minibatch, minibatch["rollouts", "group"])


@configurable
@dataclass(frozen=True)
class TokenSum(Aggregation):
    """Sum over tokens / (rollouts x max_tokens): no length bias (Dr.GRPO, Liu et al. 2025).

    A rollout counts once however many rows it has, or once per role if it has several roles.

    Args:
        max_tokens: the constant that replaces a rollout's own length, e.g.
            ``sampling.max_tokens``.
    """

    per_group: ClassVar[bool] = True

    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"TokenSum(max_tokens={self.max_tokens}) must be >= 1")

    def weights(self, minibatch: TensorDict) -> Tensor:
        return _mask(minibatch)

    def total(self, minibatch: TensorDict, weights: Tensor) -> Tensor:
        return weights.new_tensor(float(len(episode_rows(minibatch).unique()) * self.max_tokens))


def loss_tokens(micro_batch: TensorDict, scores: Scores) -> TensorDict:
    """Return the M scored tokens of a micro-batch, with the columns that losses use."""
    tokens = micro_batch["tokens"][scores.live]
    tokens["row"] = token_rows(micro_batch)[scores.live]
    tokens["demonstration"] = micro_batch["rollouts", "demonstration"][tokens["row"]]
    if "old_logprobs" not in tokens:  # one update per batch: the current policy is the old one
        tokens["old_logprobs"] = scores.logprobs.detach()
    if scores.likeliest is not None:
        tokens["likeliest_logprobs"] = scores.likeliest
    return tokens


@dataclass(frozen=True)
class Objective:
    """The function to minimise; every part except the policy loss is optional."""

    loss: PolicyLoss = PPOClip()
    correction: Correction | None = None
    kl: KLPenalty | None = None
    entropy: EntropyBonus | None = None
    value_loss: ValueLoss | None = None
    value_warmup_iterations: int = 0
    balance: LoadBalance | None = None

    def __call__(
        self, scores: Scores, tokens: TensorDict, iteration: int, all_sampled: bool = False
    ) -> tuple[Tensor, Metrics]:
        """Return loss and metrics of the M ``tokens`` that ``scores`` belong to, (M,) each.

        ``all_sampled`` promises that no token is a demonstration's, which saves a GPU's host from
        waiting.
        """
        metrics: Metrics = {"policy/entropy": scores.entropy}
        sampled = slice(None) if all_sampled else ~tokens["demonstration"]
        gap = (tokens["old_logprobs"] - tokens["rollout_logprobs"])[sampled].abs()
        metrics |= {"rollout/logprob_gap_mean": gap, "rollout/logprob_gap_max": gap}
        total = torch.zeros_like(scores.logprobs)
        if iteration >= self.value_warmup_iterations:
            total = self._policy_part(scores, tokens, iteration, sampled, metrics)
        if self.balance is not None and scores.router_outputs is not None:
            balance = self.balance(scores.router_outputs)
            total = total + (self.balance.coef or 0.0) * balance
            metrics["experts/balance_loss"] = balance.expand_as(total)
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
        ours = ~tokens["demonstration"]
        loss, extra = self.loss(scores.logprobs, tokens)
        metrics |= {f"policy/{name}": value for name, value in extra.items()}
        if self.correction is not None:
            weights, extra = self.correction(tokens)
            # No engine wrote the tokens of demonstrations, so nothing is corrected.
            loss = torch.where(tokens["demonstration"], 1.0, weights) * loss
            metrics |= {f"correction/{name}": value for name, value in extra.items()}
        metrics["policy/loss"] = loss
        if self.kl is not None:
            penalty = self.kl(scores.logprobs, tokens["ref_logprobs"]) * ours
            loss = loss + self.kl.coef.at(iteration) * penalty
            metrics["policy/kl_ref"] = penalty[sampled]
        if self.entropy is not None:
            loss = loss - self.entropy.at(iteration) * scores.entropy * ours
        return loss


@dataclass(frozen=True)
class Decision:
    """A callback's decision about the coming update; the default changes nothing.

    It is returned from ``RLCallback.on_update_start`` or ``GuardAction.act``, the same on all
    ranks.

    Args:
        skip: take no optimizer steps; the iteration still counts.
        mask: tokens (T,) to remove from the loss; if none are left on any rank, there is no update.
        correction: correction of this batch, in place of ``model.correction``.
        stop: raised at the end of the iteration, without its update if that has not yet run.
    """

    skip: bool = False
    mask: Tensor | None = None
    correction: Correction | None = None
    stop: LightningRLError | None = None


def check_parts(
    advantage: Advantage,
    objective: Objective,
    *,
    has_critic: bool,
    kl_reward: KLPenalty | None,
    reference: Reference | None,
    use_rollout_logprobs: bool,
) -> None:
    """Check the arguments of ``PolicyModule``.

    Raises:
        ConfigError: names the keys that contradict each other.
    """
    if advantage.needs_values and not has_critic:
        raise ConfigError(
            f"advantage={type(advantage).__name__} needs a critic; set critic.head to "
            "SharedValueHead or SeparateValueHead"
        )
    if kl_reward is not None and not advantage.takes_kl_reward:
        raise ConfigError(
            f"advantage={type(advantage).__name__} needs the reward as it was graded, but "
            "kl_reward subtracts a KL from it, so successes would be misjudged; set kl instead, "
            "the same penalty in the loss"
        )
    if objective.value_warmup_iterations and not advantage.needs_values:
        raise ConfigError(
            f"critic.warmup_iterations={objective.value_warmup_iterations} needs an advantage that "
            "reads values; set advantage to GAE, or remove the critic"
        )
    if reference is not None and objective.kl is None and kl_reward is None:
        raise ConfigError(
            f"reference={type(reference).__name__} is not used by any KL; set kl or kl_reward, "
            "or remove reference"
        )
    if use_rollout_logprobs and objective.correction is not None:
        raise ConfigError(
            f"correction={type(objective.correction).__name__} has nothing to correct with "
            "use_rollout_logprobs=true, which uses the engine's logprobs as the old ones; remove "
            "one of the two"
        )
