"""RLCallback: Lightning's callback with more hooks, and typed access to a run."""

from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.algos.objective import Decision
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.hooks import datamodule_of

T = TypeVar("T")
_SUPERVISED = " for supervised training"
_LANGUAGE = ", which is for language models that learn from rollouts"


class RLCallback(Callback):
    """A Lightning callback that also hears of collection, updates, syncs and finished iterations.

    ``self.log`` is not available in these hooks; use ``pl_module.record({...})``.

    ``reruns`` is True for a callback that changes what is learned: ``lightning-rl rerun``
    lets it take part again, and no other. ``language_only`` is True for one that makes nothing of
    agents that are no language models: their runs are refused with it. ``by_default`` is True for
    one that the user did not give: the run got it as one of its ``DEFAULTS``.
    """

    reruns = False
    language_only = False
    by_default = False

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before an iteration's rollouts are generated."""

    def on_collect_wait(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called about five times a second while a single process waits for rollouts to train on.

        The engine goes on meanwhile. Several processes do not call it.
        """

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        """Called with an iteration's graded rollouts, before they are trained on."""

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision | None:
        """Called with an iteration's packed batch, advantages included, before the update.

        What it returns is done to the update, before the next callback is called. Where several
        policies learn it is called for each, with the one as ``pl_module`` and its part of the
        batch; the run's module is ``trainer.lightning_module``.
        """
        return None

    def on_evaluation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before agents are evaluated in separate episodes of environments."""

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before weights are pushed to the engine."""

    def on_weights_synced(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """Called when the engine has taken over the weights of ``version``."""

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called with all that was recorded for an iteration (also for 0: before training)."""

    def on_report_written(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when ``RunReport`` has written its files, also for a run that failed; and again
        when ``IterationCheckpoint`` has saved what an exception interrupted.
        """

    def module_of(self, pl_module: LightningModule) -> RecordingModule:
        """Return ``pl_module`` as a module that counts iterations.

        Raises:
            ConfigError: if it does not, as in supervised training.
        """
        needs = "a module that counts iterations, such as PolicyModule"
        return self._the(pl_module, RecordingModule, needs, _SUPERVISED)

    def policy_module_of(self, pl_module: LightningModule) -> PolicyModule:
        """The same, where the callback needs a language model."""
        return self._the(pl_module, PolicyModule, "a PolicyModule")

    def rollout_module_of(self, pl_module: LightningModule) -> RolloutModule:
        """The same, where it may have several such, one by one in ``policies``."""
        needs = "a PolicyModule or RolesModule"
        return self._the(pl_module, RolloutModule, needs)  # type: ignore[type-abstract]

    def data_of(self, trainer: Trainer) -> CollectingDataModule:
        """The run's data module, by its type: whatever collects and evaluates.

        Raises:
            ConfigError: if it does not, as in supervised training.
        """
        needs = "a data module that collects, such as RLDataModule"
        data = datamodule_of(trainer)
        return self._the(data, CollectingDataModule, needs, _SUPERVISED)  # type: ignore[type-abstract]

    def rl_data_of(self, trainer: Trainer) -> RLDataModule:
        """The same, where the callback needs prompts, rewards or an engine."""
        return self._the(datamodule_of(trainer), RLDataModule, "an RLDataModule")

    def _the(self, found: object, kind: type[T], needs: str, why: str = _LANGUAGE) -> T:
        if not isinstance(found, kind):
            raise ConfigError(
                f"{type(self).__name__} needs {needs}, not {type(found).__name__}; remove the "
                f"callback{why}"
            )
        return found
