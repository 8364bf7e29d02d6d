"""RLCallback: Lightning's callbacks, with six more hooks."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.rollout import Rollout


class RLCallback(Callback):
    """A Lightning callback that also hears of collection, updates, syncs and finished iterations.

    ``self.log`` is not available in these hooks; use ``pl_module.record({...})``.

    ``replays`` is True for a callback that has a say in what is learned: ``lightning-rl replay``
    lets it take part again, and no other.
    """

    replays = False

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before an iteration's rollouts are generated."""

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        """Called with an iteration's graded rollouts, before they are trained on."""

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        """Called with an iteration's packed batch, advantages included, before the update."""

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before weights are pushed to the engine."""

    def on_weights_synced(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """Called when the engine has taken over the weights of ``version``."""

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called with all that was recorded for an iteration (also for 0: before training)."""


def call_hook(trainer: Trainer, hook: str, *arguments: Any) -> None:
    """Call an :class:`RLCallback` hook on every callback that has it, in order."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RLCallback):
            getattr(callback, hook)(trainer, trainer.lightning_module, *arguments)
