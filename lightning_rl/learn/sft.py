"""Supervised fine-tuning: the warm start before RL, with the same model, packing and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.objective import Aggregation, TokenMean
from lightning_rl.collect.loader import limited_epoch
from lightning_rl.config.arguments import configurable
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.data.supervised import TRAINED, RowLimit, supervised_rollout
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.learn.supervised import Pairs, SupervisedModule
from lightning_rl.learn.windows import HeldOut, Windows
from lightning_rl.models.pretrained import Loading, load_config, model_of, positions_of
from lightning_rl.models.tokenizer import load_tokenizer, with_chat_variables
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.files.resume import enter_directory, leave_directory
from lightning_rl.run.processes.cores import share_cores
from lightning_rl.run.seeding import run_seed
from lightning_rl.vision.training import Vision


@configurable(model=model_of)
class SFTModule(SupervisedModule):
    """Maximises the likelihood of given completions, with Lightning's automatic optimisation.

    Gradient clipping and accumulation are the Trainer's (``gradient_clip_val``, ...). The average
    is over all tokens of an optimizer step, however it is cut into batches and ranks.

    Args:
        model: directory or hub name of the causal LM.
        aggregation: how token losses are averaged.
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        loading: how the model is loaded: its own code, ``gradient_checkpointing`` and others.
        vision: which parts of an image-text model's vision are trained; None: none.
    """

    prefix = "sft"

    def __init__(
        self,
        model: str,
        aggregation: Aggregation = TokenMean(),
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        loading: Loading = Loading(),
        vision: Vision | None = None,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loading=loading,
            vision=vision,
        )
        save_primitive_hparams(self)
        self.aggregation = aggregation

    def weight(self, batch: TensorDict) -> Tensor:
        self.require_packed(batch)
        return self.aggregation.total(batch, self.aggregation.weights(batch))

    def sums(self, batch: TensorDict) -> Pairs:
        """Return the summed cross-entropy of the completion tokens of a packed batch."""
        self.require_packed(batch)
        weights = self.aggregation.weights(batch)
        scores = self.loaded_policy(batch)
        loss = -(scores.logprobs * weights[scores.live]).sum()
        return {"loss": (loss, self.aggregation.total(batch, weights))}


_READ_FIRST = 32
"""Number of rows that are read before the weights are."""


@configurable(train=prompts_of, val=prompts_of)
class SFTDataModule(LightningDataModule):
    """Packed batches of rows with a prompt and a completion, or with a whole conversation.

    Args:
        train: training rows, each with a completion or a conversation.
        val: held-out rows; None: no validation.
        completion_column: name of the column with the completion: a string, to which the end token
            is appended; the messages that follow those of the prompt; or token ids. Messages that
            begin with the prompt's, or with the user's where there is no prompt, are taken for the
            whole conversation.
        batch_size: rows per batch and process; an optimizer step takes ``accumulate_grad_batches``
            of them.
        seed: seed of the order; None: ``seed_everything``'s.
        chat_template_kwargs: further variables of the chat template, such as ``enable_thinking``.
        messages_column: name of the column with a whole conversation, for rows that have no
            completion.
        trained_roles: roles whose turns are trained, except messages with ``"weight": 0``; None:
            the assistant's. A conversation's first message never is.
        max_length: rows are cut to so many tokens, and left out if nothing trained is left, which
            is said once; None: rows longer than the model's positions are refused.
    """

    works_with: ClassVar[type[SupervisedModule]] = SFTModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        completion_column: str = "completion",
        batch_size: int = 32,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        messages_column: str = "messages",
        trained_roles: list[str] | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be >= 1")
        self.train = train
        self.val = val
        self.completion_column = completion_column
        self.batch_size = batch_size
        self.seed = run_seed(seed)
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.messages_column = messages_column
        self.trained_roles = tuple(trained_roles or TRAINED)
        self.max_length = max_length
        self._positions: int | None = None
        self._limit = RowLimit()

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        share_cores(self.trainer)
        module = self._module()
        enter_directory(self.trainer)
        loading, day = module.loading, module.day
        tokenizer = load_tokenizer(str(module.model), loading)
        self._tokenizer = with_chat_variables(tokenizer, self.chat_template_kwargs, day)
        self._positions = positions_of(load_config(str(module.model), loading))
        self._limit = RowLimit(self._positions, self.max_length)
        for dataset in (self.train, self.val):
            if dataset is not None:
                dataset.imply(self.implied())
                dataset.load(self._tokenizer)
                for prompt in dataset.first(_READ_FIRST):
                    self.row(prompt)

    def _module(self) -> SupervisedModule:
        module = None if self.trainer is None else self.trainer.lightning_module
        if not isinstance(module, self.works_with):
            raise ConfigError(
                f"{type(self).__name__} works with {self.works_with.__name__}, not "
                f"{type(module).__name__}"
            )
        return module

    def teardown(self, stage: str) -> None:
        if self.trainer is not None:
            leave_directory(self.trainer)

    def train_dataloader(self) -> Windows:
        trainer, module = self.trainer, self._module()
        assert trainer is not None
        repeats = bool(trainer.overfit_batches)  # type: ignore[attr-defined]
        rows = self.rows(self.train)
        return Windows(
            len(rows),
            self.batch_size,
            partial(self.batch, rows),
            None if repeats else self.seed,
            module.weight,
            lambda: module.iteration,
            lambda: trainer.accumulate_grad_batches,
            partial(limited_epoch, trainer),
        )

    def val_dataloader(self) -> Any:
        if self.val is None:
            return []
        rows = self.rows(self.val)
        return HeldOut(len(rows), self.batch_size, partial(self.batch, rows))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device)

    def batch(self, rows: Sequence[Any], order: Sequence[int], places: Sequence[int]) -> TensorDict:
        """Return a batch of the rows at some places of an order of all ``rows``."""
        return self.collate([rows[order[place]] for place in places])

    def rows(self, prompts: PromptDataset) -> Sequence[Any]:
        """Return the items of batches: the result of :meth:`row` for each row of ``prompts``."""
        self._limit = RowLimit(self._positions, self.max_length)
        rows = OfflineRows(prompts, self.row)
        self._limit.tell(repr(prompts), len(rows))
        return rows

    def implied(self) -> ImpliedPrompts:
        """Return how the prompts of whole conversations are found."""
        columns = (self.completion_column,)
        return ImpliedPrompts(columns, self.messages_column, self.trained_roles)

    def row(self, prompt: Prompt) -> Any:
        """Return a rollout to imitate; None if it is too long."""
        return self.imitated(prompt, self.completion_column)

    def imitated(self, prompt: Prompt, column: str) -> Rollout | None:
        """Return the completion in a column as a rollout, cut if it has to be."""
        rollout = supervised_rollout(prompt, column, self._tokenizer, self.trained_roles)
        return self._limit.fitted(rollout)

    @staticmethod
    def collate(rows: list[Any]) -> TensorDict:
        """Return a packed batch of some :meth:`rows`."""
        return pack_rollouts(rows)


class OfflineRows(Sequence[Any]):
    """The result of ``make``, unless None, for each prompt that is short enough, in file order.

    All rows are made and checked at once, and kept in memory, except those with pictures, which are
    made again for every batch, since the pictures of all rows may not fit into memory.

    Args:
        prompts: the prompts; already loaded.
        make: makes a row from a prompt.
    """

    def __init__(self, prompts: PromptDataset, make: Callable[[Prompt], Any]) -> None:
        self._prompts, self._make = prompts, make
        self._rows: list[Any] = []
        for index, prompt in prompts.numbered():
            if (made := make(prompt)) is not None:
                self._rows.append(made if index is None or not prompt.pictures else _Again(index))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        row = self._rows[place]
        return self._make(self._prompts[row.index]) if isinstance(row, _Again) else row


@dataclass(frozen=True, slots=True)
class _Again:
    """A row that is read again whenever it is needed."""

    index: int
