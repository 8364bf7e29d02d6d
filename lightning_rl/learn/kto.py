"""Kahneman-Tversky optimisation: from completions that are each labelled good or bad."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.errors import ConfigError, DataError, require_finite
from lightning_rl.learn.dpo import ComparedModule, completion_logprobs
from lightning_rl.learn.sft import SFTDataModule
from lightning_rl.learn.supervised import Pairs
from lightning_rl.models.pretrained import model_of
from lightning_rl.rollout import Prompt, Rollout, Row
from lightning_rl.run.files.metrics import Sums


def kto(log_ratios: Tensor, desirable: Tensor, kl: Tensor, beta: float) -> Tensor:
    """Return the loss per completion (N,): 1 - sigmoid(±beta (log ratio - kl)).

    These are eqs. 7-8 of Ethayarajh et al. 2024 (KTO, arXiv 2402.01306) without weights. A log
    ratio is log p - log p_ref of a completion, summed over its tokens; the sign is + for a
    ``desirable`` one (N,). ``kl`` is the reference point, a scalar.
    """
    assert log_ratios.shape == desirable.shape and log_ratios.ndim == 1
    above = log_ratios - kl
    return 1 - torch.sigmoid(beta * torch.where(desirable, above, -above))


@configurable(model=model_of)
class KTOModule(ComparedModule):
    """Makes desirable completions likelier and undesirable ones less likely, by KTO.

    Unlike DPO it needs no pairs. The reference point is max(0, mean of log p - log p_ref) over
    mismatched examples, in which each prompt has the completion of the row before it in the epoch's
    order; it has no gradient. The paper takes the mean over a microbatch; here it is over all
    examples of an optimizer step (of the held-out set in validation), so that it does not depend on
    how they are cut into batches and ranks. It uses automatic optimisation, so gradient clipping
    and accumulation are the Trainer's.

    Args:
        desirable_weight: weight of desirable completions. The paper advises weights by which both
            kinds count about the same: desirable_weight x their number between 1 and 4/3 of
            undesirable_weight x that of the others.
        undesirable_weight: weight of undesirable completions.

    Raises:
        ConfigError: for values out of range.
    """

    prefix = "kto"

    def __init__(
        self,
        model: str,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        require_finite(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        both = desirable_weight, undesirable_weight
        if min(both) < 0 or not any(both):
            raise ConfigError(
                f"KTOModule(desirable_weight={desirable_weight}, "
                f"undesirable_weight={undesirable_weight}): both must be >= 0, and one > 0"
            )
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self._read_apart = Sums()  # log ratios of mismatched examples
        self._kl = 0.0
        self._read: list[tuple[Tensor, Tensor, Tensor]] = []  # of held-out batches

    def weight(self, batch: TensorDict) -> Tensor:
        self.require_packed(batch)
        return torch.tensor(len(batch["rollouts"]) / 2)

    def begin_step(self, window: Sequence[TensorDict]) -> None:
        """Measure the reference point on all of a step's mismatched examples, of all ranks."""
        self._read_apart = Sums()
        for batch in window:
            self._add_apart(*self._scaled(batch.to(self.device)))
        self._kl = self._reference_point()

    def sums(self, batch: TensorDict) -> Pairs:
        """Return the sums over a batch: rows 2i are examples, 2i + 1 mismatched ones."""
        return self._summed(*self._examples(batch), self._kl)

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Read a batch; its loss waits for the reference point of all held-out rows."""
        batch, scale = self._scaled(batch)
        self._add_apart(batch, scale)
        self._read.append((*self._examples(batch), scale))

    def on_validation_epoch_end(self) -> None:
        read, self._read = self._read, []
        if read:
            kl = self._reference_point()
            for log_ratios, desirable, scale in read:
                self._held_out.add(self._summed(log_ratios, desirable, kl), scale)
        super().on_validation_epoch_end()

    def _add_apart(self, batch: TensorDict, scale: Tensor) -> None:
        """Add the log ratios of a batch's mismatched examples to the sum of all."""
        mismatched = _every_second(batch, first=1)
        with torch.no_grad():
            logprobs = completion_logprobs(self.loaded_policy(mismatched), mismatched)
        apart = logprobs - self.reference_logprobs(mismatched)
        self._read_apart.add({"kl": (apart.sum(), len(apart))}, scale)

    def _reference_point(self) -> float:
        return max(0.0, self._read_apart.means()["kl"])

    def _examples(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the log ratios of a batch's examples, and which are desirable, (N,)."""
        self.require_packed(batch)
        examples = _every_second(batch, first=0)
        logprobs = completion_logprobs(self.loaded_policy(examples), examples)
        log_ratios = logprobs - self.reference_logprobs(examples)
        return log_ratios, examples["rollouts", "reward"] > 0

    def _summed(self, log_ratios: Tensor, desirable: Tensor, kl: float) -> Pairs:
        losses = kto(log_ratios, desirable, log_ratios.new_tensor(kl), self.beta)
        losses = torch.where(
            desirable, self.desirable_weight * losses, self.undesirable_weight * losses
        )
        right = ((log_ratios.detach() > kl) == desirable).to(losses.dtype)
        summed = {"loss": losses, "accuracy": right, "kl": losses.new_full((len(losses),), kl)}
        return {name: (values.sum(), len(losses)) for name, values in summed.items()}


def _every_second(batch: TensorDict, first: int) -> TensorDict:
    return select(batch, torch.arange(first, len(batch["rollouts"]), 2))


@configurable(train=prompts_of, val=prompts_of)
class KTODataModule(SFTDataModule):
    """Makes packed batches from rows with a prompt, a completion and a label.

    Args:
        train: the training rows; completions are text, messages or token ids.
        val: held-out rows; None: no validation.
        label_column: name of the column that says whether it is desirable: true or false.
        options: further arguments of ``SFTDataModule``.

    Raises:
        DataError: if there are fewer than two rows: a completion is also given to another prompt.
    """

    works_with = KTOModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        label_column: str = "label",
        **options: Any,
    ) -> None:
        super().__init__(train, val, **options)
        self.label_column = label_column

    def row(self, prompt: Prompt) -> Any:
        """Return a rollout, whose reward is 1 if it is desirable, else 0; None: too long."""
        label = prompt.columns.get(self.label_column)
        if label not in (True, False):
            raise DataError(
                f"row {prompt.id}: {self.label_column!r} must be true or false, got {label!r:.80}; "
                "name the column that holds the label by label_column"
            )
        rollout = self.imitated(prompt, self.completion_column)
        return None if rollout is None else replace(rollout, reward=float(label))

    def rows(self, prompts: PromptDataset) -> Sequence[Any]:
        rows = super().rows(prompts)
        if len(rows) < 2:
            raise DataError(
                f"{prompts!r} holds {len(rows)} rows; KTO needs at least 2, since it measures the "
                "KL on completions that are given to other prompts"
            )
        return rows

    def batch(self, rows: Sequence[Any], order: Sequence[int], places: Sequence[int]) -> TensorDict:
        """Return a packed batch: each example, and its prompt with the completion before it."""
        longest = self._limit.longest
        pairs = ((rows[order[place]], rows[order[place - 1]]) for place in places)
        return pack_rollouts(
            [one for row, before in pairs for one in (row, _exchanged(row, before, longest))]
        )


def _exchanged(rollout: Rollout, other: Rollout, longest: int) -> Rollout:
    """Return a prompt with the completion of another, as far as the model can read it."""
    row, [given] = Row.of(rollout.prompt), other.rows
    left = longest - row.length
    row.append_given(given.token_ids[:left])
    row.loss_mask = given.loss_mask[:left]
    return replace(rollout, rows=[row])
