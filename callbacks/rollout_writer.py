"""RolloutWriter: collected rollouts in a file, without training, and where to go on with them."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.arguments import configurable
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.files import open_rollouts
from lightning_rl.run.rundir import output_path


@configurable
class RolloutWriter(RLCallback):
    """Appends every rollout of ``lightning-rl rollout`` to ``path``.

    The ending tells the format: ``.jsonl``, ``.parquet`` (a folder) or ``.sqlite``. If the file
    already holds iterations, the run goes on after them, with the next prompts.

    A fast dev run writes to its scratch directory instead.

    Raises:
        ConfigError: for another ending, or if the file was written by another model or seed.
        DataError: if the file holds something else.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open_rollouts(path)
        self.written = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.choose_file(trainer)

    def choose_file(self, trainer: Trainer) -> None:
        """Where this trainer's rollouts go."""
        path = output_path(trainer, self.path, Path(self.path).name)
        if path != self.file.path:
            self.file = open_rollouts(str(path))

    def done(self) -> int:
        """How many whole iterations the file holds; what a killed run left behind is removed."""
        progress = self.file.recover()
        return 0 if progress is None else int(progress["iterations"])

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = self.data_of(trainer)
        if trainer.world_size > 1:
            raise ConfigError(
                f"rollouts are written by one process, not by {trainer.world_size}; set "
                "trainer.devices=1"
            )
        progress = self.file.recover()
        if progress is None:
            return
        for name, value in _origin(datamodule, self.module_of(pl_module)).items():
            if progress["origin"][name] != value:
                raise ConfigError(
                    f"{self.file.path} was written with {name}={progress['origin'][name]!r}, now "
                    f"it is {value!r}; name another file, or set it back to go on with this one"
                )
        datamodule.first_iteration = int(progress["iterations"])
        datamodule.load_rollout_state(progress["state"])

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: list[Rollout],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        datamodule = self.data_of(trainer)
        iteration = datamodule.first_iteration + batch_idx
        progress = {
            "iterations": iteration + 1,
            "origin": _origin(datamodule, self.module_of(pl_module)),
            "state": datamodule.rollout_state(),
        }
        self.file.append(outputs, iteration, progress)
        self.written += len(outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.close()


def _origin(datamodule: RLDataModule, module: PolicyModule) -> dict[str, Any]:
    """What a run must share with the one that began the file."""
    return {
        "model": module.model,
        "seed": datamodule.seed,
        "group_size": datamodule.group_size,
        "groups_per_iteration": datamodule.groups_per_iteration,
    }
