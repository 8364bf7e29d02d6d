"""What a guard may do about what it found, from a line in the log to the end of the run."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.correction import Correction, TokenTIS
from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import has_zero_advantage, token_rows
from lightning_rl.errors import GuardError
from lightning_rl.module import PolicyModule
from lightning_rl.run.dist import all_sum


@dataclass(frozen=True)
class Finding:
    """A bound that was broken, while something can be done about it.

    ``batch`` is what the update is about to train on, None if it is over. ``offenders`` tells which
    tokens, (T,), broke the bound by themselves.
    """

    module: PolicyModule
    batch: TensorDict | None
    offenders: Callable[[], Tensor]
    reason: str


class GuardAction(ABC):
    """What a guard does in every iteration in which it goes off; it also logs a warning.

    ``changes_update``: it comes too late once the update is over.
    """

    changes_update: ClassVar[bool] = False

    @abstractmethod
    def act(self, finding: Finding) -> None:
        """Do it."""


@dataclass(frozen=True)
class Warn(GuardAction):
    """Nothing but the line in the log."""

    def act(self, finding: Finding) -> None:
        """The guard has logged it already."""


@configurable
@dataclass(frozen=True)
class Correct(GuardAction):
    """Trains on this batch with importance weights, whatever ``model.correction`` is.

    Args:
        correction: ``TokenTIS()`` (truncated importance sampling) or another.
    """

    correction: Correction = TokenTIS()
    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> None:
        module, batch = finding.module, finding.batch
        assert batch is not None
        if module.trust_engine_logprobs:  # else every weight would be 1
            batch["tokens", "old_logprobs"] = trainer_logprobs(module, batch)
        module.objective = dataclasses.replace(module.objective, correction=self.correction)


@dataclass(frozen=True)
class Mask(GuardAction):
    """Takes the tokens that break the bound by themselves out of the loss.

    If none is left, there is no update.
    """

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> None:
        assert finding.batch is not None
        tokens = finding.batch["tokens"]
        tokens["loss_mask"] = tokens["loss_mask"] & ~finding.offenders()
        if not all_sum(trained_tokens(finding.module, finding.batch).sum()):
            finding.module.skip_update = True


@dataclass(frozen=True)
class SkipUpdate(GuardAction):
    """Leaves this batch's update out: no optimizer steps, the iteration is counted all the same."""

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> None:
        finding.module.skip_update = True


@dataclass(frozen=True)
class StopRun(GuardAction):
    """Leaves the update out if it is still to come, saves, and ends the run with a ``GuardError``.

    ``IterationCheckpoint`` is what saves.
    """

    def act(self, finding: Finding) -> None:
        finding.module.skip_update = True
        finding.module.stopping = finding.module.stopping or GuardError(finding.reason)


def trained_tokens(module: PolicyModule, batch: TensorDict) -> Tensor:
    """Which tokens, (T,), an engine wrote and the update is going to train on."""
    row = token_rows(batch)
    left_out = batch["rollouts", "expert"]
    if module.mask_truncated:
        left_out = left_out | batch["rollouts", "truncated"]
    if module.skips_zero_advantage:
        left_out = left_out | has_zero_advantage(batch)
    return batch["tokens", "loss_mask"] & ~left_out[row]


def trainer_logprobs(module: PolicyModule, batch: TensorDict) -> Tensor:
    """Logprobs (T,) of the weights before the update, at least of the tokens it trains on.

    Where the update does without them, it is one forward pass, shared by all guards.
    """
    tokens = batch["tokens"]
    if "old_logprobs" in tokens and not module.trust_engine_logprobs:
        return tokens["old_logprobs"]
    if "guard_logprobs" not in tokens:
        rows = (
            (~has_zero_advantage(batch)).nonzero().squeeze(1)
            if module.skips_zero_advantage
            else None
        )
        with module.clock("logprob"):
            module.loaded_policy.score(batch, "guard_logprobs", module.max_tokens_per_pack, rows)
    return tokens["guard_logprobs"]
