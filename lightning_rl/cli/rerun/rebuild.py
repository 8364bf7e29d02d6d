"""Rebuilds a run's parts from its configuration, and its weights from those that were kept."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks import WeightSync
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.rerun_recorder import outcome
from lightning_rl.cli.app import RLCLI
from lightning_rl.cli.rerun.change import UNCHANGED, RerunChange
from lightning_rl.cli.rerun.recorded_batches import RecordedBatches
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import DataError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.module import PolicyModule
from lightning_rl.run.files.checkpoint_io import write_checkpoint
from lightning_rl.run.files.resume import use_new_optimizer_settings
from lightning_rl.run.hooks import callbacks_of, find_callbacks
from lightning_rl.run.processes import dist
from lightning_rl.sync.base import WeightTransport

# Whatever says when a run stops, or makes it a trial run.
_TRAINER = {
    "logger": False,
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "num_sanity_val_steps": 0,
    "profiler": None,
}


class _Rebuilt(RLCLI):
    """Builds the objects of a run's configuration as of ``version``, and runs nothing.

    They go on from ``begun``, with the changes that the run made there.
    """

    def __init__(
        self, run: RecordedRun, version: int, begun: KeptWeights, scratch: str, change: RerunChange
    ) -> None:
        self._scratch = scratch
        self._require_supported = partial(change.require_supported, run, version)
        config = ["--config", str(run.config_of(version)[1]), "--ckpt_path=null"]
        settings = [f"--{setting}" for setting in change.settings]
        if settings or run.saved_otherwise(begun):
            settings.append("--allow_changes=true")
        super().__init__(["fit", *config, *run.options, *settings])

    def before_instantiate_classes(self) -> None:
        self._require_supported()
        for name, value in {**_TRAINER, "default_root_dir": self._scratch}.items():
            self.config.fit.trainer[name] = value

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def callbacks_that_rerun(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that take part in a rerun, which set ``reruns``."""
    return [callback for callback in callbacks if getattr(callback, "reruns", False)]


@dataclass
class Remade:
    """A version of the weights, rebuilt from ``kept``, and the run's other parts.

    The trainer has no loggers or other observers. ``outcomes`` holds the result of each version on
    the way; ``checkpoint`` is what a checkpoint of it would hold, if anything was trained; on ranks
    above 0 parts of it may be empty.
    """

    kept: KeptWeights
    module: RolloutModule
    datamodule: LightningDataModule
    trainer: Trainer
    sync: WeightSync
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)

    @property
    def transport(self) -> WeightTransport:
        """What carries weights to the run's engine."""
        return self.sync.transport

    @property
    def policy(self) -> PolicyModule:
        """The policy that learned, if the run has only one.

        Raises:
            DataError: if there are several, whose versions are counted separately.
        """
        if self.module.roles:
            raise DataError(
                f"the run has {len(self.module.policies)} policies with separate versions, so "
                "rollouts that they wrote together cannot be generated or scored again; use "
                "--iteration"
            )
        [policy] = self.module.policies.values()
        return policy

    def diverged_at(self, recorded: dict[int, Outcome]) -> int | None:
        """Return the first version with other checksums than recorded; None if there is none."""
        for version, made in sorted(self.outcomes.items()):
            if version in recorded and recorded[version].weights != made.weights:
                return version
        return None


@contextmanager
def remade(
    run: RecordedRun,
    version: int,
    latest: int,
    since: int | None = None,
    observers: Sequence[Callback] = (),
    change: RerunChange = UNCHANGED,
) -> Iterator[Remade]:
    """Rebuild a version of the weights: from the nearest kept ones, on the recorded rollouts.

    Each iteration is trained with the configuration that the run had then. It needs as many
    processes as the training, and all of them have to call it. Of the run's callbacks, only those
    with ``reruns`` take part again.

    Args:
        run: the recorded run.
        version: the version of the weights.
        latest: the latest version to begin with. The parts are those of the last iteration that is
            trained, or of the one after ``version`` if that is the latest to begin with.
        since: begin with the kept weights of this version; None: the nearest.
        observers: callbacks that watch the training, before any of the run's callbacks acts.
        change: what to do differently on the way.

    Raises:
        ConfigError: if the configuration does not work here (any more).
        DataError: if the run trained no policy on rollouts, the run kept too little, or the number
            of processes is another.
    """
    kept = run.nearest(version, latest, since)
    if version > kept.version:
        rank_zero_only(print)(run.way(kept, version), file=sys.stderr, flush=True)
    latest = max(latest, version - 1)
    with tempfile.TemporaryDirectory(prefix="lightning_rl_") as scratch:
        begun, earlier = kept, dict[int, Outcome]()
        resumed, _ = run.config_of(latest)
        if resumed > kept.version:  # from there on the run was configured otherwise
            before = remade(run, resumed, kept.version, kept.version, observers, change)
            begun, earlier = _saved(before, resumed, Path(scratch))
        made = _begun(run, latest, begun, scratch, change)
        if version == begun.version:
            _load(made)
            dist.any_rank(False)  # all have read what this rank may remove
        else:
            _require_ranks(run, range(begun.version + 1, version + 1), made.trainer.world_size)
            # First, so that whatever takes part sees the weights that were kept.
            count = version - begun.version
            batches = RecordedBatches(run, begun.version, count, made.datamodule, change)
            callbacks_of(made.trainer)[:0] = [_Retraining(made, batches), *observers]
            made.trainer.fit(made.module, datamodule=batches)
        made.kept, made.outcomes = kept, made.outcomes | earlier
        yield made


@contextmanager
def remade_for_one(run: RecordedRun, version: int) -> Iterator[Remade | None]:
    """Rebuild a version of the weights for rank 0, to generate and score with; None on the others.

    All ranks have to call it, since they train together. Where they hold parts of a policy, or
    compute together, rank 0 reads what they trained into a policy of its own.

    Raises:
        ConfigError, DataError: as :func:`remade` does.
    """
    with ExitStack() as opened:
        made = opened.enter_context(remade(run, version, version))
        if not made.trainer.is_global_zero:
            yield None
            return
        policies = [module.loaded_policy for module in made.module.policies.values()]
        if any(policy.sharded or policy.sequence is not None for policy in policies):
            scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="lightning_rl_"))
            path = Path(scratch, f"iteration_{version}.ckpt")
            write_checkpoint(made.checkpoint, path)
            alone = _begun(run, version, KeptWeights(version, path), scratch)
            _load(alone)
            made = replace(alone, kept=made.kept, outcomes=made.outcomes)
        yield made


def _begun(
    run: RecordedRun,
    version: int,
    begun: KeptWeights,
    scratch: str,
    change: RerunChange = UNCHANGED,
) -> Remade:
    """Build the run's parts as of ``version``, with which training would go on from ``begun``."""
    cli = _Rebuilt(run, version, begun, scratch, change)
    if not isinstance(cli.model, RolloutModule):
        raise DataError(
            f"{run.config} trains {type(cli.model).__name__}; only runs in which a "
            "PolicyModule or RolesModule learns from rollouts can be rerun"
        )
    cli.model.day.date = run.day or cli.model.day.date
    callbacks = callbacks_of(cli.trainer)
    syncs = find_callbacks(cli.trainer, WeightSync)
    callbacks[:] = callbacks_that_rerun(callbacks)
    return Remade(begun, cli.model, cli.datamodule, cli.trainer, (*syncs, WeightSync())[0])


def _saved(
    remaking: AbstractContextManager[Remade], version: int, folder: Path
) -> tuple[KeptWeights, dict[int, Outcome]]:
    """Save a version that is trained again, for all ranks of this node to go on from.

    Also return the outcomes up to it.
    """
    with remaking as made:
        path = Path(dist.from_rank_zero(str(folder / f"iteration_{version}.ckpt")))
        with dist.every_rank():
            if dist.rank() == 0:
                write_checkpoint(made.checkpoint, path)
        return KeptWeights(version, path), made.outcomes


def _load(made: Remade) -> None:
    made.module.configure_model()
    # In this order, as when training begins: what was kept is read into the trainer's precision.
    made.trainer.precision_plugin.convert_module(made.module)
    if made.kept.path is not None:
        checkpoint = made.kept.load()
        made.module.going_on_from = made.kept.path  # named if it does not fit
        made.module.on_load_checkpoint(checkpoint)  # first, as Lightning does
        made.module.load_state_dict(checkpoint["state_dict"])
    made.outcomes[made.kept.version] = outcome(made.trainer, made.module, {})


def _require_ranks(run: RecordedRun, versions: range, world_size: int) -> None:
    """Require the same number of processes: another order of summation changes the results."""
    for version, made in sorted(run.log.outcomes().items()):
        if version in versions and made.ranks != world_size:
            raise DataError(
                f"{run.path}: version {version} was trained by {made.ranks} processes, but this "
                f"rerun has {world_size}; rerun with as many: start it as the run was started "
                "(trainer.devices and num_nodes of its config.yaml, torchrun)"
            )


def checkpoint_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint would hold now; all ranks gather what a strategy leaves sharded."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    gathered: dict[str, Any] = apply_to_collection(checkpoint, Tensor, full_tensor)
    return gathered


class _Retraining(RLCallback):
    """Begins with kept weights, and records the results."""

    def __init__(self, made: Remade, batches: RecordedBatches) -> None:
        self.made, self.batches = made, batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.made.kept.path is not None:
            self._restore(trainer, pl_module, self.made.kept.path)
        self.on_iteration_end(trainer, pl_module, {})

    def _restore(self, trainer: Trainer, pl_module: LightningModule, path: Path) -> None:
        """Do what ``ckpt_path`` would, except for the position in the epoch, which differs here."""
        strategy = trainer.strategy
        checkpoint = strategy.load_checkpoint(path, weights_only=True)
        self.made.module.going_on_from = path  # named if it does not fit
        pl_module.on_load_checkpoint(checkpoint)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)
        schedules = checkpoint["lr_schedulers"]
        for config, state in zip(trainer.lr_scheduler_configs, schedules, strict=True):
            config.scheduler.load_state_dict(state)
        use_new_optimizer_settings(pl_module)

    def on_update_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Decision:
        if self.batches.skipped:  # else the iteration would record nothing, and not be counted
            self.module_of(trainer.lightning_module).record({"policy/skipped_share": 1.0})
        return Decision(skip=self.batches.skipped)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        found = outcome(trainer, self.rollout_module_of(pl_module), metrics)
        self.made.outcomes[found.version] = found

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.made.checkpoint = checkpoint_of(trainer)
