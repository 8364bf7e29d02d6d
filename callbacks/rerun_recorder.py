"""RerunRecorder: keeps what is needed to repeat an iteration, and to prove that nothing changed."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.recorder import collected_rollouts
from lightning_rl.callbacks.report import installed_versions
from lightning_rl.config.arguments import configurable
from lightning_rl.config.layers import config_files
from lightning_rl.data.rollouts.ledger import Ledger, digest_of_file, digest_of_json
from lightning_rl.data.rollouts.log import Outcome, RerunLog
from lightning_rl.data.rollouts.seals import Seals, folders_in
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.run.digest import digests
from lightning_rl.run.files.checkpoint_io import checkpoints_in, written_digest
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.run.hooks import find_callbacks
from lightning_rl.run.processes.machine import cpu_model


@configurable
class RerunRecorder(RLCallback):
    """Keeps all rollouts that are trained on, a checksum of each version's weights, and a ledger.

    Rollouts and checksums go to ``rerun`` in the run directory, in about nine bytes per token. The
    ledger is ``ledger.jsonl``: configuration and environment of each start, for each iteration the
    digests of its rollouts, metrics and weights before and after, the digest of each checkpoint,
    and those of all other files, chained by hash; ``lightning-rl audit`` checks it. Every
    ``fit`` on rollouts gets this callback if it has a logger, and so a run directory.

    Args:
        rollouts: False keeps only the checksums and metrics; then a rollout can be repeated if
            another callback recorded it and its version is in a checkpoint, but an iteration
            cannot.
    """

    language_only = True

    def __init__(self, rollouts: bool = True) -> None:
        self.rollouts = rollouts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.rollout_module_of(pl_module)
        run = run_dir(trainer)
        if trainer.is_global_zero:  # also of a former run in this directory
            RerunLog(run).forget_after(module.iteration)
        trainer.strategy.barrier()
        made = outcome(trainer, module, {})
        self._ledger = Ledger(run)
        self._seals, self._ended = Seals(run), False
        entries = (entry for _, entry in self._ledger.lines() if entry)
        saved = (entry for entry in entries if entry.get("kind") == "checkpoint")
        self._sealed = {entry["file"]: entry["sha256"] for entry in saved}
        self._version, self._weights = made.version, digest_of_json(made.weights)
        if not trainer.is_global_zero:
            return
        RerunLog(run).write_outcome(made)
        self._seal_checkpoints(trainer)
        self._ledger.append(
            "begin",
            version=made.version,
            run=module.run_id,
            weights=self._weights,
            configuration=digests_of(run, list(config_files(run).values())),
            environment=environment_of(trainer),
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.rollouts:
            log, rollouts = RerunLog(run_dir(trainer)), collected_rollouts(trainer)
            iteration = self.rollout_module_of(pl_module).present_iteration
            log.write_rollouts(iteration, trainer.global_rank, rollouts)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        # On every rank: sharded weights are gathered.
        made = outcome(trainer, self.rollout_module_of(pl_module), metrics)
        if not trainer.is_global_zero:
            return
        run = run_dir(trainer)
        log = RerunLog(run)
        log.write_outcome(made)
        self._seal_checkpoints(trainer)
        metrics_digest, weights = digest_of_json(made.metrics), digest_of_json(made.weights)
        if made.version == self._version:  # a row of metrics beside that of the iteration
            self._ledger.append(
                "metrics",
                version=made.version,
                metrics=metrics_digest,
                files=self._seals.grown(),
            )
            return
        self._ledger.append(
            "iteration",
            version=made.version,
            rollouts=digests_of(run, log.files_of(made.version)),
            weights_before=self._weights,
            weights_after=weights,
            metrics=metrics_digest,
            files=self._seals.grown(),
        )
        self._version, self._weights = made.version, weights

    def on_report_written(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seal_end(trainer)  # also where the run fails

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._seal_end(trainer)

    def _seal_end(self, trainer: Trainer) -> None:
        """Record all files of the run in the ledger, once, and again if something was written
        since.
        """
        if not trainer.is_global_zero or not hasattr(self, "_ledger"):
            return
        run = run_dir(trainer)
        for logger in trainer.loggers:  # what they keep in memory until their own end
            logger.save()
        head = self._ledger.head
        self._seal_checkpoints(trainer)
        files = self._seals.all()
        if files or not self._ended or self._ledger.head != head:
            self._ledger.append("end", version=self._version, files=files, folders=folders_in(run))
            self._ended = True

    def _seal_checkpoints(self, trainer: Trainer) -> None:
        """Record new checkpoints in the ledger, with their own digests, and those that were
        removed.
        """
        run = run_dir(trainer)
        for folder in checkpoint_folders(trainer):
            for file in reversed(checkpoints_in(folder)):
                digest, name = written_digest(file), name_in(run, file)
                if digest is not None and self._sealed.get(name) != digest:
                    self._ledger.append("checkpoint", file=name, sha256=digest)
                    self._sealed[name] = digest
        for name in [name for name, digest in self._sealed.items() if digest is not None]:
            if not (run / name).exists():
                self._ledger.append("checkpoint", file=name, sha256=None)
                self._sealed[name] = None


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Return the folders in which this run's callbacks keep checkpoints."""
    folders = (getattr(c, "dirpath", None) for c in find_callbacks(trainer, Checkpoint))
    return sorted({Path(folder) for folder in folders if folder and "://" not in str(folder)})


def name_in(run: Path, file: Path) -> str:
    """Return a file's path within the run directory; its full path if it is elsewhere."""
    file, run = file.resolve(), run.resolve()
    return str(file.relative_to(run) if file.is_relative_to(run) else file)


def digests_of(run: Path, files: list[Path]) -> dict[str, str]:
    """Return the digest of each of the run's files that exists, by its path within the run."""
    return {name_in(run, file): digest_of_file(file) for file in files if file.is_file()}


def environment_of(trainer: Trainer) -> dict[str, Any]:
    """Return what rounding depends on besides the code: versions, device, threads, processes."""
    device = trainer.strategy.root_device
    cuda = device.type == "cuda"
    return {
        "python": sys.version.partition(" ")[0],
        **installed_versions(),
        "device": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "kernels": torch.version.cuda if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
    }


def outcome(trainer: Trainer, module: RolloutModule, metrics: dict[str, float]) -> Outcome:
    """Return the digests of the present weights, prefixed by the policy's name if there are
    several.
    """
    weights = digests(
        (f"{name}.{key}" if name else key, weight)
        for name, policy in module.policies.items()
        for key, weight in policy.loaded_policy.state_dict().items()
    )
    return Outcome(module.iteration, weights, metrics, trainer.world_size)
