"""Supervised training of a single agent from labels, before it is trained in environments."""

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.bodies import Body, MLPBody
from lightning_rl.envs.networks.exploring import require_no_memory
from lightning_rl.envs.networks.pretrained import LAYERS, layers_of
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError, DataError, require_at_least
from lightning_rl.games.label_heads import LabelHead
from lightning_rl.games.labelled import LABEL, LabelledData, rows_of, space_of
from lightning_rl.learn.base import FiniteStepsModule, save_primitive_hparams
from lightning_rl.learn.schedulers import automatic, check_automatic, make_scheduler
from lightning_rl.run.hooks import datamodule_of
from lightning_rl.run.seeding import derived_generator, run_seed
from lightning_rl.run.token_metrics import TokenMetrics


class SoloAgent(nn.Module):
    """A body, and a head that predicts labels from its features."""

    def __init__(self, body: Body, head: LabelHead, space: Space) -> None:
        super().__init__()
        self.body = body
        self.head = head
        head.build(body.build(space))

    def forward(self, observations: TensorDict) -> Tensor:
        """Return the head's outputs (N, ...)."""
        outputs: Tensor = self.head(self.body(observations))
        return outputs


@configurable
class SoloModule(FiniteStepsModule):
    """Trains a body on labels, alone; other agents can start from its checkpoint.

    ``ActorCritic(pretrained=...)``, ``QAgent`` and ``SACAgent`` load the body from there. It uses
    Lightning's automatic optimisation: clipping and accumulation are the Trainer's. It logs
    ``solo/loss``, and for each epoch the means of what the head measures, such as
    ``solo/accuracy``, ``solo/accuracy_class_0`` and ``solo/accuracy_worst``; for held-out rows the
    same as ``solo/val_loss`` and so on.

    Args:
        head: the kind of label: ``ClassHead`` or ``NumberHead``.
        body: makes the features; set it as for the agent that will start from the checkpoint.
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.

    Raises:
        ConfigError: if the body is recurrent.
    """

    def __init__(
        self,
        head: LabelHead,
        body: Body | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        require_no_memory(body=body)
        save_primitive_hparams(self)
        self._given = (body if body is not None else MLPBody(), head)  # hidden until they are built
        self.agent: SoloAgent | None = None
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def configure_model(self) -> None:
        """Build body and head for the data, once.

        Raises:
            ConfigError: if the body cannot read the observations, or if there are no labels.
        """
        if self.agent is not None:
            return
        data = datamodule_of(self.trainer)
        if not isinstance(data, SoloDataModule):
            raise ConfigError(
                f"SoloModule learns from labels, but {type(data).__name__} has none; use "
                "SoloDataModule"
            )
        body, head = deepcopy(self._given)
        for source, rows in data.rows.items():
            head.check(rows[LABEL], source)
        self.agent = SoloAgent(body, head, data.space)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.lr_scheduler is None:
            return optimizer
        scheduler = make_scheduler(self.lr_scheduler, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": automatic(scheduler)}

    def on_train_start(self) -> None:
        check_automatic(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.agent is not None:
            checkpoint[LAYERS] = layers_of(self.agent.body)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch of rows."""
        loss = self._step(batch)
        self.log("solo/loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Log the loss and the head's metrics for held-out rows."""
        loss = self._step(batch)
        self.log("solo/val_loss", loss, batch_size=len(batch), sync_dist=True)

    test_step = validation_step

    def _step(self, batch: TensorDict) -> Tensor:
        assert self.agent is not None
        outputs, labels = self.agent(batch), batch[LABEL]
        self._measured.add(self.agent.head.measure(outputs.detach(), labels))
        return self.agent.head.loss(outputs, labels).mean()

    # Validation runs within a training epoch, so each has sums of its own.
    def on_train_epoch_start(self) -> None:
        self._measured = TokenMetrics()

    def on_train_epoch_end(self) -> None:
        self._log_measured("")

    def on_validation_epoch_start(self) -> None:
        self._outer, self._measured = getattr(self, "_measured", None), TokenMetrics()

    def on_validation_epoch_end(self) -> None:
        self._log_measured("val_")
        if self._outer is not None:
            self._measured = self._outer

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def _log_measured(self, prefix: str) -> None:
        assert self.agent is not None
        means = self._measured.compute()
        means |= self.agent.head.summarize(means)
        self.log_dict({f"solo/{prefix}{name}": value for name, value in means.items()})


@configurable
class SoloDataModule(LightningDataModule):
    """Serves rows of observations with labels, in an order that the seed decides.

    Args:
        train: the training rows.
        val: held-out rows; None for none.
        batch_size: rows per step, on each process.
        seed: seeds the order; None: the seed of ``seed_everything``.

    Raises:
        ConfigError: if ``batch_size`` is less than 1.
    """

    def __init__(
        self,
        train: LabelledData,
        val: LabelledData | None = None,
        batch_size: int = 64,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, batch_size=batch_size)
        self.train = train
        self.val = val
        self.batch_size = batch_size
        self.seed = run_seed(seed)
        self.rows: dict[str, TensorDict] = {}
        """All rows by ``train`` and ``val``; loaded by ``setup``."""

    @property
    def space(self) -> Space:
        """The space of the rows' observations; known after ``setup``."""
        return space_of(self.rows["train"])

    def setup(self, stage: str) -> None:
        """Load all rows, once.

        Raises:
            DataError: if rows are malformed, or if training and held-out rows differ in form.
        """
        if self.rows:
            return
        self.rows["train"] = rows_of(self.train)
        if self.val is None:
            return
        self.rows["val"] = rows_of(self.val)
        ours, theirs = (space_of(rows).observations for rows in self.rows.values())
        if ours != theirs:
            raise DataError(
                f"data.val ({self.val.name}) has the observations {theirs}, but data.train has "
                f"{ours}; give both the same observations"
            )

    def train_dataloader(self) -> DataLoader[TensorDict]:
        order = derived_generator(self.seed)
        return self._loader("train", shuffle=True, generator=order)

    def val_dataloader(self) -> Any:
        return self._loader("val") if "val" in self.rows else []

    test_dataloader = val_dataloader

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device)

    def _loader(self, part: str, **options: Any) -> DataLoader[TensorDict]:
        rows = self.rows[part]
        places: Any = range(len(rows))
        return DataLoader(
            places, self.batch_size, collate_fn=lambda some: rows[torch.tensor(some)], **options
        )
