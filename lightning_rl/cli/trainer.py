"""RLTrainer: Lightning's Trainer with additions for the commands ``test`` and ``rollout``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.cli.series import CheckpointSeries, as_table, checkpoints_named
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.rundir import output_path


class RLTrainer(Trainer):
    """Lightning's Trainer, plus tests of several checkpoints, and collecting without training.

    Args:
        default_root_dir: where loggers, and ``lightning_rl_runs``, begin: a local directory; None:
            the working directory.
    """

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
        checkpoints: list[str] | str | None = None,
    ) -> list[Mapping[str, Any]]:
        """Evaluate on held-out prompts; optionally several checkpoints with one engine.

        Args:
            model: the module to test.
            dataloaders: used in place of ``datamodule``.
            ckpt_path: a checkpoint whose weights to use instead of the model's own.
            verbose: print the metrics.
            datamodule: the data to test on.
            weights_only: as in ``fit``.
            checkpoints: a list of files, or a folder, of which each is loaded and tested; the
                metrics also go to ``test.json`` in the run directory, and each is compared with the
                first on the same prompts.

        Returns:
            Metrics; for ``checkpoints`` a row for each, with ``checkpoint`` and ``iteration``.

        Raises:
            ConfigError: if a checkpoint cannot be used, or ``ckpt_path`` is given as well.
        """
        if isinstance(dataloaders, LightningDataModule):
            dataloaders, datamodule = None, dataloaders
        arguments = (model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        if checkpoints is None:
            return super().test(*arguments)
        if ckpt_path is not None:
            raise ConfigError(
                f"ckpt_path={str(ckpt_path)!r} and checkpoints both set what to test; leave one out"
            )
        paths = checkpoints_named(checkpoints)
        model = model or self.lightning_module
        series = CheckpointSeries(self, model, datamodule, paths, weights_only)
        series.datamodule.test_series = LazyLoader(series.test, len(paths))
        try:
            super().test(model, verbose=False, datamodule=datamodule)
        finally:
            series.datamodule.test_series = None
        if verbose and self.is_global_zero:
            print("\n".join([as_table(series.rows), *series.comparisons]), flush=True)
        return list(series.rows)

    def rollout(
        self,
        model: RolloutModule,
        datamodule: RLDataModule,
        output: str,
        iterations: int = 1,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Write graded rollouts to a file, without training; continues a file that is incomplete.

        Args:
            model: the policy.
            datamodule: prompts, engine and rewards.
            output: the file; .jsonl, .parquet (a folder) or .sqlite.
            iterations: the number of batches of groups_per_iteration groups that the file shall
                hold.
            ckpt_path: a checkpoint whose weights to use instead of the model's own.
            weights_only: as in ``fit``.

        Raises:
            ConfigError: if ``iterations`` is below 1, or ``datamodule`` does not collect rollouts.
            DataError: if ``output`` holds something else.
        """
        if not isinstance(datamodule, RLDataModule):
            raise ConfigError(
                f"rollout collects from an RLDataModule, not {type(datamodule).__name__}; set data"
            )
        if iterations < 1:
            raise ConfigError(f"iterations={iterations} must be >= 1")
        writer = RolloutWriter(output)
        writer.choose_file(self)
        done = writer.done()
        if done >= iterations:
            print(f"{output} already holds {done} iterations; raise --iterations to add to them")
            return
        datamodule.iterations_per_epoch = iterations - done
        self.callbacks.append(writer)  # type: ignore[attr-defined]
        self.predict(
            model,
            datamodule=datamodule,
            ckpt_path=ckpt_path,
            weights_only=weights_only,
            return_predictions=False,
        )
        holds = f"{writer.done()} iterations"
        print(f"{writer.written} rollouts written to {writer.file.path}, which holds {holds}")


class RolloutWriter(RLCallback):
    """Appends every rollout of ``lightning-rl rollout`` to ``path``.

    The suffix chooses the format: ``.jsonl``, ``.parquet`` (a folder) or ``.sqlite``. If the file
    already holds iterations, the run continues after them, with the next prompts.

    A fast dev run writes to its scratch directory instead.

    Args:
        path: the file or folder.

    Raises:
        ConfigError: if the suffix is another, or the file was written with another model or seed.
        DataError: if the file holds something else.
    """

    language_only = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open_rollouts(path)
        self.written = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.choose_file(trainer)

    def choose_file(self, trainer: Trainer) -> None:
        """Choose the file for this trainer's rollouts."""
        path = output_path(trainer, self.path, Path(self.path).name)
        if path != self.file.path:
            self.file = open_rollouts(str(path))

    def done(self) -> int:
        """Return the number of complete iterations in the file; removes what a killed run left
        behind.
        """
        progress = self.file.recover()
        return 0 if progress is None else int(progress["iterations"])

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = self.rl_data_of(trainer)
        if trainer.world_size > 1:
            raise ConfigError(
                f"rollouts can be written by one process only, not {trainer.world_size}; set "
                "trainer.devices=1"
            )
        progress = self.file.recover()
        if progress is None:
            return
        for name, value in _origin(datamodule, self.rollout_module_of(pl_module)).items():
            if progress["origin"][name] != value:
                raise ConfigError(
                    f"{self.file.path} was written with {name}={progress['origin'][name]!r}, but "
                    f"now it is {value!r}; choose another file, or set it back to continue this one"
                )
        datamodule.first_iteration = int(progress["iterations"])
        datamodule.collection.load_shares([progress["state"]["batches"]])
        datamodule.collection.load_state_of_others(progress["state"])

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: list[Rollout],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        datamodule = self.rl_data_of(trainer)
        iteration, collection = datamodule.first_iteration + batch_idx + 1, datamodule.collection
        progress = {
            "iterations": iteration,
            "origin": _origin(datamodule, self.rollout_module_of(pl_module)),
            "state": {"batches": collection.state_dict()} | collection.state_of_others(),
        }
        self.file.append(outputs, iteration, progress)
        self.written += len(outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.close()


def _origin(datamodule: RLDataModule, module: RolloutModule) -> dict[str, Any]:
    """Return settings that a run must share with the one that began the file."""
    return {
        "model": module.described_as,
        "seed": datamodule.seed,
        "group_size": datamodule.group_size,
        "groups_per_iteration": datamodule.groups_per_iteration,
    }
