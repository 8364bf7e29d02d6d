"""What of a packed batch an update does not train on, and the batch without it."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import empty_like, select, token_rows


@dataclass
class LeftOut:
    """Which rollouts of a batch have no part in an update."""

    truncated: bool
    """Those that hit ``max_tokens`` have no loss (DAPO's overlong filtering)."""
    zero_advantage: bool
    """Those without any advantage, as they cannot move the policy.

    So it is where nothing but an advantage gives a sampled token a gradient.
    """

    def without_truncated(self, batch: TensorDict) -> TensorDict:
        """Take truncated rollouts out of the loss, if that is wanted."""
        if self.truncated:
            truncated_T = batch["rollouts", "truncated"][token_rows(batch)]
            batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & ~truncated_T
        return batch

    def rows(self, batch: TensorDict) -> Tensor | None:
        """Flags, (R,), of rollouts that are to be left out of the batch; None: of none."""
        return has_zero_advantage(batch) if self.zero_advantage else None

    def trained_tokens(self, batch: TensorDict) -> Tensor:
        """Tokens, (T,), that an engine wrote and the update is going to train on."""
        without_loss = batch["rollouts", "expert"]
        if self.truncated:
            without_loss = without_loss | batch["rollouts", "truncated"]
        rows = self.rows(batch)
        if rows is not None:
            without_loss = without_loss | rows
        return batch["tokens", "loss_mask"] & ~without_loss[token_rows(batch)]


def has_zero_advantage(batch: TensorDict) -> Tensor:
    """Flags, (R,), of rollouts that are sampled and have no advantage on any loss token."""
    tokens = batch["tokens"]
    idle = ~batch["rollouts", "expert"]
    idle[token_rows(batch)[(tokens["advantages"] != 0) & tokens["loss_mask"]]] = False
    return idle


def without(batch: TensorDict, left_out: Tensor) -> TensorDict:
    """The other rollouts than those ``left_out`` (R,); if none is, the first, without loss tokens.

    Its gradient is zero, and not missing: the optimizer steps as ever, together with other ranks.
    """
    return empty_like(batch) if left_out.all() else select(batch, (~left_out).nonzero().squeeze(1))


def without_flags(flags: Tensor, left_out: Tensor) -> Tensor:
    """What ``flags`` (R,), on the host, are of :func:`without`'s batch."""
    left_out = left_out.cpu()
    nothing = torch.zeros(1, dtype=torch.bool, device="cpu")
    return nothing if left_out.all() else flags[~left_out]


def rows_beside(*flags: Tensor | None) -> Tensor | None:
    """Return the indices of the rows that none of these flags (R,) mark; None without flags."""
    given = [some.cpu() for some in flags if some is not None]
    return (~torch.stack(given).any(0)).nonzero().squeeze(1) if given else None
