"""RLCallback: Lightning's callback with more hooks, and what it sees of a run by its type."""

from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.algos.objective import Decision
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.hooks import datamodule_of


class RLCallback(Callback):
    """A Lightning callback that also hears of collection, updates, syncs and finished iterations.

    ``self.log`` is not available in these hooks; use ``pl_module.record({...})``.

    ``reruns`` is True for a callback that has a say in what is learned: ``lightning-rl rerun``
    lets it take part again, and no other.
    """

    reruns = False

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before an iteration's rollouts are generated."""

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        """Called with an iteration's graded rollouts, before they are trained on."""

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision | None:
        """Called with an iteration's packed batch, advantages included, before the update.

        What it returns is done to the update, before the next callback is called.
        """
        return None

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before weights are pushed to the engine."""

    def on_weights_synced(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """Called when the engine has taken over the weights of ``version``."""

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called with all that was recorded for an iteration (also for 0: before training)."""

    def module_of(self, pl_module: LightningModule) -> PolicyModule:
        """A hook's ``pl_module``, by its type.

        Raises:
            ConfigError: if it is another, as in supervised training.
        """
        if not isinstance(pl_module, PolicyModule):
            raise ConfigError(
                f"{type(self).__name__} needs a PolicyModule, not {type(pl_module).__name__}; "
                "remove the callback for supervised training"
            )
        return pl_module

    def data_of(self, trainer: Trainer) -> RLDataModule:
        """The run's data module, by its type.

        Raises:
            ConfigError: if it is another, as in supervised training.
        """
        datamodule = datamodule_of(trainer)
        if not isinstance(datamodule, RLDataModule):
            raise ConfigError(
                f"{type(self).__name__} needs an RLDataModule, not {type(datamodule).__name__}; "
                "remove the callback for supervised training"
            )
        return datamodule
