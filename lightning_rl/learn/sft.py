"""Supervised fine-tuning: the warm start before RL, with the same model, packing and head."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rl.algos.objective import Aggregation, TokenMean
from lightning_rl.config.arguments import configurable
from lightning_rl.config.lightning_flags import refuse_precision
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import AnyPrompts, prompts_of, supervised_rollout
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import LearningModule, save_primitive_hparams
from lightning_rl.learn.offline_rows import OfflineRows
from lightning_rl.learn.precision import make_optimizer, use_our_precision
from lightning_rl.models.parallel.sharding import refuse_mesh
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import model_of
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.tokenizer import load_tokenizer, with_chat_variables
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.hooks import named_callbacks
from lightning_rl.run.processes.cores import share_cores
from lightning_rl.run.seeding import derived_generator, run_seed
from lightning_rl.vision.training import Vision


class SupervisedModule(LearningModule):
    """Learns from fixed completions: the common part of SFT, DPO, KTO and reward models."""

    def configure_callbacks(self) -> list[Callback]:
        """Reject an unsupported precision, and return the callbacks that every run has.

        This is the first hook that Lightning calls.
        """
        refuse_precision(self.trainer, "16-mixed")
        use_our_precision(self.trainer)
        return named_callbacks("basic_callbacks", self.trainer)

    def configure_model(self) -> None:
        """Load the model, once."""
        refuse_mesh(self)
        if self.policy is None:
            self.policy = Policy(
                self.model,
                random_init=self.random_init,
                gradient_checkpointing=self.gradient_checkpointing,
                lora=self.lora,
                loading=self.loading,
                vision=self.vision,
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["day"] = self.day.date

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.day.date = checkpoint.get("day", self.day.date)

    def configure_optimizers(self) -> Any:
        groups = self.loaded_policy.parameter_groups(None)
        optimizer = make_optimizer(self, self.optimizer, groups)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@configurable(model=model_of)
class SFTModule(SupervisedModule):
    """Maximises the likelihood of given completions, with Lightning's automatic optimisation.

    Gradient clipping and accumulation are the Trainer's (``gradient_clip_val``, ...).

    Args:
        model: directory or hub name of the causal LM.
        aggregation: how token losses are averaged.
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        gradient_checkpointing: recompute activations in backward; True for all of them, or
            ``Recompute`` to choose.
        random_init: start from random weights instead of those in ``model``.
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``from_pretrained``, such as ``revision``.
        vision: which parts of an image-text model's vision are trained; None: none.
    """

    def __init__(
        self,
        model: str,
        aggregation: Aggregation = TokenMean(),
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_checkpointing: bool | Recompute = False,
        random_init: bool = False,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        vision: Vision | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            lr_scheduler,
            gradient_checkpointing,
            trust_remote_code,
            model_kwargs,
            random_init,
            vision=vision,
        )
        save_primitive_hparams(self)
        self.aggregation = aggregation

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the completion tokens of a packed batch."""
        loss = self._loss(batch)
        self.log("sft/loss", loss, prog_bar=True, batch_size=len(batch["rollouts"]))
        return loss

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Log the same loss on held-out rows."""
        self.log("sft/val_loss", self._loss(batch), batch_size=len(batch["rollouts"]))

    def _loss(self, batch: TensorDict) -> Tensor:
        self.require_packed(batch)
        scores = self.loaded_policy(batch)
        return -(scores.logprobs * self.aggregation(batch)[scores.live]).sum()


@configurable(train=prompts_of, val=prompts_of)
class SFTDataModule(LightningDataModule):
    """Packed batches of rows with a prompt and a completion.

    Args:
        train: training rows, each with a completion.
        val: held-out rows; None: no validation.
        completion_column: name of the column with the completion, a string; the end token is
            appended.
        batch_size: rows per step.
        seed: seed of the order; None: ``seed_everything``'s.
        chat_template_kwargs: further variables of the chat template, such as ``enable_thinking``.
    """

    works_with: ClassVar[type[LightningModule]] = SFTModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        completion_column: str = "completion",
        batch_size: int = 32,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
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

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        share_cores(self.trainer)
        module: Any = self.trainer.lightning_module
        if not isinstance(module, self.works_with):
            raise ConfigError(
                f"{type(self).__name__} works with {self.works_with.__name__}, not "
                f"{type(module).__name__}"
            )
        loading: Any = module.loading
        day: Any = module.day
        tokenizer = load_tokenizer(str(module.model), loading)
        self._tokenizer = with_chat_variables(tokenizer, self.chat_template_kwargs, day)
        for dataset in (self.train, self.val):
            if dataset is not None:
                dataset.load(self._tokenizer)

    def train_dataloader(self) -> DataLoader[Rollout]:
        order, places = derived_generator(self.seed), range(len(self.train))
        orders: Any = DataLoader(places, self.batch_size, shuffle=True, generator=order)  # type: ignore[arg-type]
        # A resumed run draws the orders of the epochs before it once more, to go on with the next.
        # Saved at an epoch's end, the epoch is processed and not yet completed.
        progress: Any = self.trainer.fit_loop.epoch_progress.current if self.trainer else None
        for _ in range(progress.processed if progress else 0):
            for _ in zip(range(len(orders)), orders, strict=False):  # Lightning asks for no more
                pass
        return self._loader(self.train, shuffle=True, generator=order)

    def val_dataloader(self) -> Any:
        return [] if self.val is None else self._loader(self.val)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device)

    def _loader(self, prompts: PromptDataset, **options: Any) -> DataLoader[Rollout]:
        rows = self.rows(prompts)
        return DataLoader(rows, self.batch_size, collate_fn=self.collate, **options)  # type: ignore[arg-type]

    def rows(self, prompts: PromptDataset) -> Sequence[Any]:
        """Return the items of batches: the result of :meth:`row` for each row of ``prompts``."""
        return OfflineRows(prompts, self.row)

    def row(self, prompt: Prompt) -> Any:
        """Return a rollout to imitate."""
        return supervised_rollout(prompt, self.completion_column, self._tokenizer)

    @staticmethod
    def collate(rows: list[Any]) -> TensorDict:
        """Return a packed batch of some :meth:`rows`."""
        return pack_rollouts(rows)
