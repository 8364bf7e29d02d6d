"""SupervisedModule: learning from fixed rows, by Lightning's automatic optimisation."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.lightning_flags import refuse_precision
from lightning_rl.learn.base import LearningModule
from lightning_rl.learn.loop_position import continue_at, position_of, rewind
from lightning_rl.learn.precision import make_optimizer, use_our_precision
from lightning_rl.learn.schedulers import automatic, check_automatic, make_scheduler
from lightning_rl.learn.windows import SCALE, Windows
from lightning_rl.models.parallel.strategy import refuse_mesh
from lightning_rl.models.policy import Policy
from lightning_rl.run.files.metrics import Sums
from lightning_rl.run.processes.dist import all_sum, gather, world_size

Pairs = dict[str, tuple[Tensor, Tensor | float]]
"""Sums by name, each with the count that it is divided by; that of the loss is the weight."""


class SupervisedModule(LearningModule):
    """Learns from fixed completions: the common part of SFT, DPO, KTO and reward models.

    An iteration is one optimizer step: all batches that are accumulated for it, of all ranks. Loss
    and metrics are sums over all of them, divided by the total weight, so neither depends on
    ``batch_size``, ``accumulate_grad_batches`` or the number of ranks, given the rows of a step.
    Held-out metrics are likewise those of all held-out rows. Each step's metrics are one row.
    """

    default_save_every = 500

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._step, self._held_out = Sums(), Sums()
        self._skipped_before = 0
        self._validated = -1  # the iteration after which the held-out rows were last read

    @abstractmethod
    def weight(self, batch: TensorDict) -> Tensor:
        """Return what a batch adds to the number that the sum of losses is divided by."""

    @abstractmethod
    def sums(self, batch: TensorDict) -> Pairs:
        """Return the summed loss of a batch, with its weight, as ``loss``, and further metrics."""

    def begin_step(self, window: Sequence[TensorDict]) -> None:
        """Called before the first batch of an optimizer step, with all of this rank's batches."""

    @property
    def iteration_ended(self) -> bool:
        return not self.trainer.fit_loop._should_accumulate()

    # ---------------------------------------------------------------- set-up

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        refuse_precision(trainer, "16-mixed")

    def configure_callbacks(self) -> list[Callback]:
        callbacks = super().configure_callbacks()
        use_our_precision(self.trainer)
        return callbacks

    def configure_model(self) -> None:
        """Load the model, once."""
        refuse_mesh(self)
        if self.policy is None:
            self.policy = Policy(
                self.model, lora=self.lora, loading=self.loading, vision=self.vision
            )

    def configure_optimizers(self) -> Any:
        groups = self.loaded_policy.parameter_groups(None)
        optimizer = make_optimizer(self, self.optimizer, groups)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = make_scheduler(self.lr_scheduler, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": automatic(scheduler)}

    # ---------------------------------------------------------------- learning

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        """Return a batch's share of the optimizer step's mean loss.

        Lightning divides it by ``accumulate_grad_batches``, and averages gradients over ranks.
        """
        if not self._step:
            loader = self._windows()
            self.begin_step([batch] if loader is None else loader.window)
        batch, scale = self._scaled(batch)
        sums = self.sums(batch)
        self._step.add(sums, scale)
        loss = sums["loss"][0]
        # Not multiplied where it stands in for no rows: they may make it infinite.
        return loss * scale.to(loss.dtype)

    def _scaled(self, batch: TensorDict) -> tuple[TensorDict, Tensor]:
        """Return the batch without its scale, and that; of other data, that of the batch alone."""
        if isinstance(batch, TensorDict) and SCALE in batch:
            return batch.exclude(SCALE), batch[SCALE]
        total = all_sum(self.weight(batch).double())
        return batch, world_size() / total.clamp(min=1e-12)

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """Take the step, which ends an iteration, and record its metrics."""
        super().optimizer_step(*arguments, **options)
        self.iteration += 1
        skipped, self._skipped_before = (
            self.nonfinite_steps - self._skipped_before,
            self.nonfinite_steps,
        )
        row = {**self._step.means(), "lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        if math.isfinite(self.grad_norm):
            row["grad_norm"] = self.grad_norm
        row["nonfinite_skipped"] = float(skipped)
        self.record({f"{self.prefix}/{name}": value for name, value in row.items()})

    # ---------------------------------------------------------------- held-out rows

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Add a batch to the sums of the held-out rows."""
        batch, scale = self._scaled(batch)
        self._held_out.add(self.sums(batch), scale)

    def on_validation_epoch_end(self) -> None:
        """Record the loss and metrics of all held-out rows, as ``.../val_...``."""
        if not self._held_out:
            return
        means = self._held_out.means()
        found = {f"{self.prefix}/val_{name}": value for name, value in means.items()}
        if self.trainer.state.fn != "fit":
            self.log_dict(found, sync_dist=True)
        elif not self.trainer.sanity_checking:
            self._validated = self.iteration
            self.record(found)

    def on_validation_end(self) -> None:
        # Last of all hooks of a validation, so that all of it is in the row.
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.flush_metrics()

    # ---------------------------------------------------------------- going on

    def _windows(self) -> Windows | None:
        """Return the loader, unless the user has passed another."""
        loader = None if self._trainer is None else self.trainer.train_dataloader
        return loader if isinstance(loader, Windows) else None

    def random_states(self) -> list[dict[str, Any]]:
        loader = self._windows()
        # Within a step, the state is that of the step's begin.
        within = loader is not None and loader.untrained
        return gather(loader.random) if loader is not None and within else super().random_states()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        loader = self._windows()
        if loader is not None:
            position = position_of(self.trainer, loader, self._validated == self.iteration)
            checkpoint["lightning_rl"]["place"] = position

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        position = checkpoint["lightning_rl"].get("place")
        if position is not None and self._trainer is not None and self.trainer.state.fn == "fit":
            rewind(position, checkpoint["loops"]["fit_loop"])

    def on_train_start(self) -> None:
        check_automatic(self)
        state = self._restored if self.trainer.ckpt_path else None
        super().on_train_start()
        if state is None:
            return
        if self._recorded:  # held-out metrics, which belong to the row before
            self.flush_metrics()
        loader = self._windows()
        if loader is not None and "place" in state:
            self._validated = self.iteration if state["place"]["validated"] else -1
            continue_at(self.trainer, loader, state["place"])
