"""Supervised training of one agent by itself: labels first, environments later."""

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
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
from lightning_rl.run.hooks import datamodule_of, named_callbacks
from lightning_rl.run.metrics import TokenMetrics
from lightning_rl.run.seeding import derived_generator, run_seed


class SoloAgent(nn.Module):
    """A body, and a head that makes labels of its features."""

    def __init__(self, body: Body, head: LabelHead, space: Space) -> None:
        super().__init__()
        self.body = body
        self.head = head
        head.build(body.build(space))

    def forward(self, observations: TensorDict) -> Tensor:
        """Outputs (N, ...) of the head."""
        outputs: Tensor = self.head(self.body(observations))
        return outputs


@configurable
class SoloModule(FiniteStepsModule):
    """Teaches a body from labels, alone; its checkpoint is what other agents can begin with.

    ``ActorCritic(pretrained=...)``, ``QAgent`` and ``SACAgent`` take the body from there.
    Automatic optimisation, plain Lightning: clipping and accumulation are the Trainer's. It logs
    ``solo/loss``, and for each epoch the means of what the head measures, such as
    ``solo/accuracy``, ``solo/accuracy_class_0`` and ``solo/accuracy_worst``; of held-out rows the
    same as ``solo/val_loss`` and so on.

    Args:
        head: what labels are: ``ClassHead`` or ``NumberHead``.
        body: makes the features; as the agent that is to begin with it has it.
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.

    Raises:
        ConfigError: for a body with a memory.
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

    def configure_callbacks(self) -> list[Callback]:
        """Add our display."""
        return named_callbacks("own_display", self.trainer)

    def configure_model(self) -> None:
        """Build body and head for the data (once).

        Raises:
            ConfigError: if the body cannot read the observations, or there are no labels.
        """
        if self.agent is not None:
            return
        data = datamodule_of(self.trainer)
        if not isinstance(data, SoloDataModule):
            raise ConfigError(
                f"SoloModule learns from labels, and {type(data).__name__} has none; use "
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
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.agent is not None:
            checkpoint[LAYERS] = layers_of(self.agent.body)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        """The mean loss of some rows."""
        loss = self._step(batch)
        self.log("solo/loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """The same on held-out rows."""
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
    """Rows of observations with labels, in an order that the seed decides.

    Args:
        train: to learn from.
        val: held-out rows; None for none.
        batch_size: rows per step, on each process.
        seed: of the order; None: ``seed_everything``'s.

    Raises:
        ConfigError: for a ``batch_size`` below 1.
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
        """All of them, as ``train`` and ``val``; loaded by ``setup``."""

    @property
    def space(self) -> Space:
        """What the rows show; known after ``setup``."""
        return space_of(self.rows["train"])

    def setup(self, stage: str) -> None:
        """Load all rows (once).

        Raises:
            DataError: for rows that are not as they should be, or not alike.
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
                f"data.val ({self.val.name}) shows {theirs}, and data.train shows {ours}; give "
                "both the same observations"
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
