"""Selects the rollouts of a packed batch that an update does not train on, and removes them."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.kl import KLPenalty
from lightning_rl.algos.objective import Objective
from lightning_rl.data.batch import empty_like, select, token_rows
from lightning_rl.run.token_metrics import TokenMetrics


@dataclass
class SkippedRollouts:
    """Which rollouts of a batch are excluded from an update."""

    truncated: bool
    """Exclude the loss of rollouts that reached ``max_tokens`` (DAPO's overlong filtering)."""
    zero_advantage: bool
    """Exclude rollouts without any advantage, if they cannot change the policy.

    This holds if only an advantage gives a sampled token a gradient.
    """

    @classmethod
    def of(
        cls,
        advantage: Advantage,
        objective: Objective,
        kl_reward: KLPenalty | None = None,
        mask_truncated: bool = False,
    ) -> "SkippedRollouts":
        """Return what an update with these parts excludes."""
        others = objective.kl, objective.entropy, objective.balance, kl_reward
        return cls(
            truncated=mask_truncated,
            zero_advantage=objective.loss.zero_at_zero_advantage
            and not any(part is not None for part in others)
            and not advantage.needs_values
            and not advantage.needs_teacher,
        )

    def without_truncated(self, batch: TensorDict) -> TensorDict:
        """Remove truncated rollouts from the loss, if ``truncated`` is set."""
        if self.truncated:
            truncated_T = batch["rollouts", "truncated"][token_rows(batch)]
            batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & ~truncated_T
        return batch

    def rows(self, batch: TensorDict) -> Tensor | None:
        """Return flags, (R,), of the rollouts to leave out of the batch; None: leave out none."""
        return has_zero_advantage(batch) if self.zero_advantage else None

    def trained(self, minibatch: TensorDict, metrics: TokenMetrics) -> TensorDict:
        """Return a minibatch without the rollouts to leave out, and record their share.

        Its ``loss_weights`` are there already: these rollouts count where a loss is averaged.
        """
        skipped = self.rows(minibatch)
        if skipped is None:
            return minibatch
        metrics.add({"policy/skipped_share": skipped})
        return without(minibatch, skipped)

    def trained_tokens(self, batch: TensorDict) -> Tensor:
        """Return flags, (T,), of the tokens that an engine wrote and that will be trained on."""
        without_loss = batch["rollouts", "demonstration"]
        if self.truncated:
            without_loss = without_loss | batch["rollouts", "truncated"]
        rows = self.rows(batch)
        if rows is not None:
            without_loss = without_loss | rows
        return batch["tokens", "loss_mask"] & ~without_loss[token_rows(batch)]


def has_zero_advantage(batch: TensorDict) -> Tensor:
    """Return flags, (R,), of sampled rollouts without an advantage on any loss token."""
    tokens = batch["tokens"]
    idle = ~batch["rollouts", "demonstration"]
    idle[token_rows(batch)[(tokens["advantages"] != 0) & tokens["loss_mask"]]] = False
    return idle


def without(batch: TensorDict, skipped: Tensor) -> TensorDict:
    """Return the batch without the rollouts ``skipped`` (R,).

    If no rollout remains, it returns the first one without loss tokens. Its gradient is then zero
    instead of missing, so the optimizer steps as usual, together with other ranks.
    """
    return empty_like(batch) if skipped.all() else select(batch, (~skipped).nonzero().squeeze(1))


def rows_beside(*flags: Tensor | None) -> Tensor | None:
    """Return the indices of the rows that none of these flags (R,) mark; None without flags."""
    given = [some.cpu() for some in flags if some is not None]
    return (~torch.stack(given).any(0)).nonzero().squeeze(1) if given else None
