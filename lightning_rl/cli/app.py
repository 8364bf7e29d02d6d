"""LightningCLI for RL: a run's default parts, and messages that name the key, the value and the
fix.
"""

import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Parameter

from lightning_rl.callbacks import IterationCheckpoint, WeightSync
from lightning_rl.callbacks.evaluate import check_evaluations
from lightning_rl.callbacks.stopping import StopWhenTold
from lightning_rl.cli.parser import RLArgumentParser, as_checked, checked_sources, trainer_help
from lightning_rl.cli.requested import RequestedRun, listed
from lightning_rl.cli.series import require_checkpoint
from lightning_rl.cli.trainer import RLTrainer
from lightning_rl.cli.trust import require_trusted, require_trusted_parts, split_options
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.checks import check_sync
from lightning_rl.collect.loader import limited_epoch
from lightning_rl.config import names
from lightning_rl.config.hints import import_object
from lightning_rl.config.layers import Table, flatten
from lightning_rl.config.lightning_flags import require_few_devices
from lightning_rl.config.mistakes import innermost
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError, local_path
from lightning_rl.learn.base import FiniteStepsModule, RecordingModule
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.precision import check_optimizer
from lightning_rl.learn.schedulers import check_scheduler
from lightning_rl.learn.update_schedules import EveryIteration
from lightning_rl.run.files.newest_run import continue_newest_run
from lightning_rl.run.files.resume import KeepConfigs
from lightning_rl.run.files.rundir import WRITE_LOCALLY, require_writable_dirs
from lightning_rl.run.hooks import find_callbacks, is_fast_dev_run
from lightning_rl.run.processes.peers import lost_peer
from lightning_rl.run.seeding import drawn_seed


class RLCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``rollout`` with any module and data module.

    Args:
        args: a command line, beginning with its command.
    """

    def __init__(self, args: list[str]) -> None:
        self._command = args[0]
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=RLTrainer,
            parser_class=RLArgumentParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=KeepConfigs,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the requested subcommand: building a parser for each takes four times as
        long.
        """
        all_of_them = LightningCLI.subcommands() | {"rollout": {"model", "datamodule"}}
        return {self._command: all_of_them[self._command]}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument("--allow_changes", type=bool | list[str], default=False)
        parser.command = subcommand  # type: ignore[attr-defined]
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        command, *rest = args
        rest, self.trusted = split_options(rest)
        if "--trainer.help" in rest:
            print(trainer_help())
            raise SystemExit(0)
        of_class = any(a.split("=")[0].endswith(".help") for a in rest)
        if of_class:
            names.load_all()  # the parser knows short names of what has been imported
        if not of_class and not {"-h", "--help"} & set(rest):
            subparser = self._subcommand_parsers[command]
            sources = checked_sources(rest, subparser, self.trusted)
            _require_checkpoint(sources.tree.get("ckpt_path"))
            rest = as_checked(sources, rest)
        # super() would warn that args is not sys.argv
        self.config = parser.parse_args([command, *rest])
        self._require_trusted_parts()
        self._push_weights()

    def table(self) -> Table:
        """Return the configuration of ``fit``, flattened."""
        text = self._parser("fit").dump(self.config.fit, skip_unset=False, format="json")
        return flatten(json.loads(text))

    def _require_trusted_parts(self) -> None:
        if self.trusted is not None:
            config = self.config[self.config.subcommand].as_dict()
            require_trusted_parts(config, self.trusted, {"trainer": RLTrainer})

    def _push_weights(self) -> None:
        """Configure the ``WeightSync`` that a run with an engine gets anyway, unless one is.

        So ``config.yaml`` says how weights were pushed, and a run that resumes is compared with it.
        """
        config = self.config[self.config.subcommand]
        given = listed(config.trainer.callbacks)
        classes = [import_object(callback.class_path) for callback in given]
        if not issubclass(import_object(config.data.class_path), RLDataModule):
            return
        if not any(inspect.isclass(c) and issubclass(c, WeightSync) for c in classes):
            parser = LightningArgumentParser()
            parser.add_argument("--callback", type=Callback)
            default = parser.parse_object({"callback": {"class_path": "WeightSync"}}).callback
            config.trainer.callbacks = [default, *given]

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if not isinstance(self.model, FiniteStepsModule):  # ours add it, as the other defaults
            callbacks = [*callbacks, StopWhenTold()]
        _require_own_states(listed(config["callbacks"]))
        require_few_devices(config["devices"])
        return super()._instantiate_trainer(config, callbacks)

    def _parse_ckpt_path(self) -> None:
        try:
            self._require_trusted_checkpoint()
            super()._parse_ckpt_path()
            self._require_trusted_parts()
        except Exception as error:  # not a checkpoint, or one of another model class
            path = self.config[self.config.subcommand].ckpt_path
            raise ConfigError(f"ckpt_path: {path!r} cannot be used: {innermost(error)}") from error

    def _require_trusted_checkpoint(self) -> None:
        """Check the classes that a checkpoint's hyper-parameters name, too."""
        path = self.config[self.config.subcommand].get("ckpt_path")
        if self.trusted is not None and path and Path(path).is_file():
            hparams = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            require_trusted(hparams.get("hyper_parameters", {}), self.trusted, f"{path}: ")

    def _set_seed(self) -> None:
        """Draw a seed if asked to, and report it, so that the run can be repeated."""
        config = self.config[self.config.subcommand]
        if config.seed_everything is True:
            config.seed_everything = drawn_seed()
            rank_zero_info(
                f"seed_everything=true: drew {config.seed_everything}; set this number to repeat "
                "the run"
            )
        super()._set_seed()

    def instantiate_classes(self) -> None:
        self._require_local_directories()
        try:
            super().instantiate_classes()
        except Exception as error:  # a constructor refused its arguments
            raise innermost(error) from error

    def _require_local_directories(self) -> None:
        """Refuse URLs before Lightning asks for a package such as s3fs, which would not help."""
        given = self.config[self.config.subcommand].trainer
        local_path(given.default_root_dir or ".", "trainer.default_root_dir")
        local = [kind.__name__ for kind in WRITE_LOCALLY]
        for logger in listed(given.logger):
            if logger.class_path.rpartition(".")[2] in local:
                directory = logger.init_args.get("save_dir") or "."
                local_path(directory, "trainer.logger.save_dir")

    def after_instantiate_classes(self) -> None:
        """Find further mistakes before a model is loaded and an engine is started."""
        if self.subcommand == "fit" and isinstance(self.model, RecordingModule):
            self._note_configuration()
        if isinstance(self.model, FiniteStepsModule):  # now, before any process is started
            self.model.check_trainer(self.trainer)
        if isinstance(self.model, RolloutModule):
            for name, policy in self.model.policies.items():
                key = f"model.init_args.policies.{name}." if name else "model."
                _check_steps(policy, key, planned_steps(self.trainer, self.datamodule, policy))
        elif isinstance(self.model, FiniteStepsModule):
            _check_steps(self.model, "model.")
        if isinstance(self.datamodule, RLDataModule):
            syncs = [sync.schedule for sync in find_callbacks(self.trainer, WeightSync)]
            check_sync(syncs, self.datamodule.collector)
        if isinstance(self.datamodule, CollectingDataModule):
            check_evaluations(self.trainer)

    def _note_configuration(self) -> None:
        """Record the configuration, which is stored in checkpoints and compared when the run
        resumes.
        """
        require_writable_dirs(self.trainer)
        config = self.config.fit
        self.model.configuration = self.table()
        self.model.allow_changes = config.allow_changes
        if config.ckpt_path is not None and Path(config.ckpt_path).exists():
            self.model.going_on_from = Path(config.ckpt_path)

    def _run_subcommand(self, subcommand: str) -> None:
        _start_loggers(self.trainer)
        saves = find_callbacks(self.trainer, IterationCheckpoint)
        if subcommand == "fit" and self.config.fit.ckpt_path == "last" and not saves:
            continue_newest_run(self.trainer)  # as it would do
        try:
            super()._run_subcommand(subcommand)
        except MisconfigurationException as error:  # Lightning's own: what it cannot do
            raise innermost(error) from error
        except RuntimeError as error:
            lost = lost_peer(error)
            if lost is None:
                raise
            raise lost from error


def read(arguments: Sequence[str]) -> RequestedRun:
    """Read a configuration, and build nothing.

    Raises:
        ConfigError: if ``fit`` would refuse it.
    """

    class Read(RLCLI):
        def instantiate_classes(self) -> None:
            pass

        def after_instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    cli = Read(["fit", *arguments])
    text = cli._parser("fit").dump(cli.config.fit, skip_unset=False, format="json")
    trust = [] if cli.trusted is None else ["--trusted_only"]
    options = [*trust, *(f"--trust={module}" for module in cli.trusted or ())]
    return RequestedRun(json.loads(text), options)


def _start_loggers(trainer: Trainer) -> None:
    """Connect the loggers of remote services now, as Lightning is about to.

    Raises:
        ConfigError: naming the logger, and why it does not start, such as a missing key.
    """
    if is_fast_dev_run(trainer):
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger | CSVLogger):
            continue  # which only make a folder, and not before it is known in which run
        try:
            getattr(logger, "experiment", None)
        except Exception as error:  # whatever a service's client raises
            first = str(error).strip().splitlines()[:1]
            raise ConfigError(
                f"trainer.logger: {type(logger).__name__} failed to start "
                f"({type(error).__name__}: {''.join(first)}); log in, set it offline, or use "
                "CSVLogger"
            ) from error


def planned_iterations(trainer: Trainer, data: Any) -> int | None:
    """Return the number of iterations of a run; None if ``max_epochs`` does not bound it."""
    length, epochs = getattr(data, "iterations_per_epoch", None), trainer.max_epochs
    if length is None or epochs is None or epochs < 0:
        return None
    return epochs * limited_epoch(trainer, length)


def planned_steps(trainer: Trainer, data: Any, policy: Any) -> int:
    """Return the most optimizer steps that a policy can take in a run; 1 if not known yet."""
    iterations = planned_iterations(trainer, data)
    each, bounds = policy.update.steps, []
    if iterations is not None:
        schedule = getattr(policy, "schedule", EveryIteration())
        bounds.append(schedule.count(iterations) * each)
    if trainer.max_steps >= 0:  # the iteration that reaches it is finished
        bounds.append(math.ceil(trainer.max_steps / each) * each)
    return min(bounds, default=1)


def _check_steps(module: Any, key: str, steps: int = 1) -> None:
    """Create the optimizer and learning-rate schedule for a dummy parameter, and try as many steps
    of the schedule as there will be.

    Raises:
        ConfigError: if one of them cannot be created, or used.
    """
    if not hasattr(module, "optimizer"):
        return
    try:
        check_optimizer(module.optimizer)
        module.optimizer([Parameter(torch.zeros(1))])
        if getattr(module, "lr_scheduler", None) is not None:
            check_scheduler(module.lr_scheduler, module.optimizer, steps)
    except Exception as error:  # a learning rate below 0, say
        what = f"{key}init_args.optimizer, lr_scheduler: {innermost(error)}"
        raise ConfigError(what) from error


def _require_own_states(callbacks: list[Callback]) -> None:
    """Check that every callback stores its state under a unique name, as the Trainer requires.

    Raises:
        ConfigError: naming the callback that is there twice.
    """
    stateful = [c for c in callbacks if is_overridden("state_dict", instance=c)]
    names_of_states = [callback.state_key for callback in stateful]
    for callback in stateful:
        count = names_of_states.count(callback.state_key)
        if count > 1:
            raise ConfigError(
                f"trainer.callbacks: there are {count} {type(callback).__name__} with the same "
                "settings, which a checkpoint cannot tell apart; remove all but one"
            )


def _require_checkpoint(path: Any) -> None:
    if path in ("best", "hpc"):
        raise ConfigError(
            f"ckpt_path: {path!r} names a checkpoint that this process saved, but it has saved "
            "none yet; use last, or the path of a file, such as RUN/checkpoints/best.ckpt"
        )
    special = ("last", "registry")  # registry:name:version
    if path is None or str(path).split(":")[0] in special or "://" in str(path):
        return
    require_checkpoint(path, "ckpt_path")


def main(arguments: list[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``rollout``, as the first argument says; returns 0."""
    RLCLI(arguments)
    return 0
