"""Kahneman-Tversky optimisation: from completions that are each labelled good or bad."""

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import AnyPrompts, prompts_of, supervised_rollout
from lightning_rl.errors import ConfigError, DataError, require_finite
from lightning_rl.learn.dpo import ComparedModule, completion_logprobs
from lightning_rl.learn.sft import SFTDataModule
from lightning_rl.models.pretrained import model_of
from lightning_rl.rollout import Prompt, Rollout, Row
from lightning_rl.run.processes.dist import all_sum


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
    mismatched examples, in which each prompt of the batch has the completion of the one before it;
    it has no gradient. It uses automatic optimisation, so gradient clipping and accumulation are
    the Trainer's.

    Args:
        desirable_weight: weight of desirable completions. The paper advises weights by which both
            kinds count about the same: desirable_weight x their number between 1 and 4/3 of
            undesirable_weight x that of the others.
        undesirable_weight: weight of undesirable completions.

    Raises:
        ConfigError: for values out of range.
    """

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

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch: rows 2i are examples, 2i + 1 mismatched ones."""
        loss, metrics = self._loss(batch)
        count = len(batch["rollouts"]) // 2
        self.log("kto/loss", loss, prog_bar=True, batch_size=count)
        self.log_dict({f"kto/{name}": x for name, x in metrics.items()}, batch_size=count)
        return loss

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Log loss and accuracy on held-out examples."""
        loss, metrics = self._loss(batch)
        found = {"kto/val_loss": loss, "kto/val_accuracy": metrics["accuracy"]}
        self.log_dict(found, batch_size=len(batch["rollouts"]) // 2)

    def _loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss and metrics: the KL, and the share on the right side of it."""
        self.require_packed(batch)
        rows = torch.arange(len(batch["rollouts"]))
        examples, mismatched = (select(batch, rows[first::2]) for first in (0, 1))
        with torch.no_grad():
            apart = completion_logprobs(self.loaded_policy(mismatched), mismatched)
        kl = _mean(apart - self.reference_logprobs(mismatched)).clamp(min=0)
        ref = self.reference_logprobs(examples)
        log_ratios = completion_logprobs(self.loaded_policy(examples), examples) - ref
        desirable = examples["rollouts", "reward"] > 0
        losses = kto(log_ratios, desirable, kl, self.beta)
        losses = torch.where(
            desirable, self.desirable_weight * losses, self.undesirable_weight * losses
        )
        right = (log_ratios.detach() > kl) == desirable
        return losses.mean(), {"kl": kl, "accuracy": right.float().mean()}


def _mean(values: Tensor) -> Tensor:
    """Return the mean over all ranks."""
    total, count = all_sum(torch.stack([values.double().sum(), torch.ones_like(values).sum()]))
    return (total / count).to(values.dtype)


@configurable(train=prompts_of, val=prompts_of)
class KTODataModule(SFTDataModule):
    """Makes packed batches from rows with a prompt, a completion and a label.

    Args:
        train: the training rows; completions are text or token ids.
        val: held-out rows; None: no validation.
        completion_column: name of the column with the completion.
        label_column: name of the column that says whether it is desirable: true or false.
        batch_size: rows per step and process, at least 2: the completions of a batch are also given
            to one another's prompts.
        seed: seed of the order; None: ``seed_everything``'s.
        chat_template_kwargs: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        ConfigError: for a ``batch_size`` below 2.
    """

    works_with = KTOModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        completion_column: str = "completion",
        label_column: str = "label",
        batch_size: int = 32,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(train, val, completion_column, batch_size, seed, chat_template_kwargs)
        if batch_size < 2:
            raise ConfigError(
                f"KTODataModule(batch_size={batch_size}) must be >= 2: the KL is measured on "
                "completions that are given to other prompts of the batch"
            )
        self.label_column = label_column

    def row(self, prompt: Prompt) -> Any:
        """Return a rollout, whose reward is 1 if it is desirable, else 0."""
        label = prompt.columns.get(self.label_column)
        if label not in (True, False):
            raise DataError(
                f"row {prompt.id}: {self.label_column!r} must be true or false, got {label!r:.80}; "
                "name the column that holds the label by label_column"
            )
        rollout = supervised_rollout(prompt, self.completion_column, self._tokenizer)
        return replace(rollout, reward=float(label))

    @staticmethod
    def collate(rows: list[Any]) -> TensorDict:
        """Return a packed batch: each example, and its prompt with the completion before it."""
        mismatched = map(_exchanged, rows, [rows[-1], *rows[:-1]])
        return pack_rollouts([one for pair in zip(rows, mismatched, strict=True) for one in pair])


def _exchanged(rollout: Rollout, other: Rollout) -> Rollout:
    """Return a prompt with the completion of another."""
    row, [given] = Row.of(rollout.prompt), other.rows
    row.append_written(given.token_ids, given.logprobs, given.versions)
    return replace(rollout, rows=[row])
