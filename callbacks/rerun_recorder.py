"""RerunRecorder: what `lightning-rl rerun` needs to do a run's rollouts and iterations again."""

from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.recorder import collected_rollouts
from lightning_rl.config.arguments import configurable
from lightning_rl.module import PolicyModule
from lightning_rl.rollouts.log import Outcome, RerunLog, checksums
from lightning_rl.run.rundir import run_dir


@configurable
class RerunRecorder(RLCallback):
    """Keeps all rollouts that are trained on, and a checksum of each version's weights.

    They go to ``rerun`` in the run directory, in about nine bytes per token. The command line
    adds this callback to every ``fit`` that has a logger, and so a run directory.

    Args:
        rollouts: False keeps the checksums and metrics only; then a rollout can be done again if
            another callback recorded it and its version is in a checkpoint, an iteration cannot.
    """

    def __init__(self, rollouts: bool = True) -> None:
        self.rollouts = rollouts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.module_of(pl_module)
        if trainer.is_global_zero:  # also of a former run in this directory
            RerunLog(run_dir(trainer)).forget_after(module.iteration)
        trainer.strategy.barrier()
        self._write_outcome(trainer, module, {})

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        if self.rollouts:
            log, rollouts = RerunLog(run_dir(trainer)), collected_rollouts(trainer)
            log.write_rollouts(self.module_of(pl_module).iteration, trainer.global_rank, rollouts)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self._write_outcome(trainer, self.module_of(pl_module), metrics)

    def _write_outcome(
        self, trainer: Trainer, module: PolicyModule, metrics: dict[str, float]
    ) -> None:
        made = outcome(trainer, module, metrics)  # on every rank: sharded weights are gathered
        if trainer.is_global_zero:
            RerunLog(run_dir(trainer)).write_outcome(made)


def outcome(trainer: Trainer, module: PolicyModule, metrics: dict[str, float]) -> Outcome:
    """What the weights are now."""
    weights = checksums(module.loaded_policy.state_dict().items())
    return Outcome(module.iteration, weights, metrics, trainer.world_size)
