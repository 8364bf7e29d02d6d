"""Base classes of modules that learn: finite steps, one row of metrics per iteration, plain
hparams.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import ModelParallelStrategy
from tensordict import TensorDict
from torch.optim import Optimizer

from lightning_rl.config.layers import Change
from lightning_rl.config.lightning_flags import refuse_unasked_resuming
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.learn.frozen_base import adapted, leave_out_base, put_back_base
from lightning_rl.learn.gradients import skip_step, step_norm
from lightning_rl.learn.schedulers import step_plateaus
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import GivenModel, Loading
from lightning_rl.models.tokenizer import RunDay
from lightning_rl.run.clock import StageClock
from lightning_rl.run.files.metrics import named
from lightning_rl.run.files.resume import check_resume, configuration_of, use_new_optimizer_settings
from lightning_rl.run.hooks import (
    call_hook,
    default_callbacks,
    is_fast_dev_run,
    use_own_saver,
)
from lightning_rl.run.processes.dist import any_rank
from lightning_rl.run.seeding import gather_random_states, restore_random_states
from lightning_rl.vision.training import Vision


def save_primitive_hparams(module: LightningModule) -> None:
    """Call ``save_hyperparameters`` for the calling ``__init__``, keeping only primitive values.

    ``weights_only`` loading rejects other objects. Under the CLI all values are primitives (class
    paths and arguments); in code, objects such as an advantage are left out and have to be passed
    to ``load_from_checkpoint`` again.
    """
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    # Subclasses' arguments too. Lightning would stop at `configurable`, which stands between.
    while frame is not None and frame.f_locals.get("self") is module:
        if "__class__" in frame.f_locals:
            module.save_hyperparameters(frame=frame)
        frame = frame.f_back
    for name, value in list(module.hparams.items()):
        if isinstance(value, Loading | UpdateSettings):
            module.hparams[name] = vars(module)["_hparams_initial"][name] = asdict(value)
    for name in [n for n, v in module.hparams.items() if not _primitive(v)]:
        del module.hparams[name]
        vars(module)["_hparams_initial"].pop(name, None)


def _primitive(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_primitive(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_primitive(v) for v in value)
    # A GivenModel's directory will be gone when a checkpoint is loaded.
    kinds = (bool, int, float, str)
    return value is None or (isinstance(value, kinds) and not isinstance(value, GivenModel))


class FiniteStepsModule(LightningModule):
    """A module that skips optimizer steps whose gradient is not finite, on all ranks alike.

    Weights and optimizer state then stay as they were before the batch. A NaN in the loss causes a
    NaN in the gradient.
    """

    prefix: ClassVar[str] = "policy"
    """First part of the names of metrics of learning."""
    nonfinite_steps = 0
    """Number of skipped steps since the module was built, or since this was set to 0."""
    _warned = False
    grad_norm = math.nan
    """Global norm of the gradient of the latest optimizer step, before it was clipped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with weights of its own, as averages of them need; it shares the rest.

        The rest may hold what cannot be copied: an engine, a service's client, the command line.
        """
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        own = ("_parameters", "_buffers", "_modules")
        copy.__dict__ = self.__getstate__() | {
            name: deepcopy(self.__dict__[name], memo) for name in own
        }
        return copy

    def check_trainer(self, trainer: Trainer) -> None:
        """Refuse settings of a Trainer that this training does not support.

        Raises:
            ConfigError: names the setting, its value, and what to set instead.
        """
        refuse_unasked_resuming(trainer)

    def configure_callbacks(self) -> list[Callback]:
        """Refuse Trainer settings that do not work, and return the callbacks that every run has.

        This is the first hook that Lightning calls.
        """
        self.check_trainer(self.trainer)
        if not self.automatic_optimization and is_fast_dev_run(self.trainer):
            # It is meant in batches, which are limited too, but counts optimizer steps.
            self.trainer.fit_loop.epoch_loop.max_steps = -1
        return default_callbacks(self.trainer)

    @cached_property
    def day(self) -> RunDay:
        """The date on which the run began, for chat templates that mention it."""
        return RunDay()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.grad_norm = step_norm(optimizer)
        if any_rank(not math.isfinite(self.grad_norm)):
            self.leave_out(optimizer)

    def leave_out(self, optimizer: Optimizer) -> None:
        """Make the optimizer's next step change nothing, and count it as skipped."""
        skip_step(optimizer, self.prefix, warn=not self._warned)
        self.nonfinite_steps += 1
        self._warned = True


class RecordingModule(FiniteStepsModule):
    """A module that counts iterations, times stages and records metrics, for any kind of policy.

    ``iteration`` is the number of completed iterations, which is also the version of the weights.
    """

    iteration: int = 0
    name = ""
    """The module's name among several that learn; empty if it learns alone."""
    default_save_every: ClassVar[int] = 10
    """Iterations between two checkpoints, where the configuration does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = StageClock()
        self._recorded: dict[str, float] = {}
        self._written = -1  # the iteration whose row was written last
        self._restored: dict[str, Any] | None = None
        self.run_id = ""
        """Identifier of the run that checkpoints belong to; a resumed run keeps it."""
        self.configuration: dict[str, Any] | None = None
        """The run's configuration, by key; None: only what the objects themselves tell."""
        self.allow_changes: bool | list[str] = False
        """Configuration keys that may differ from the resumed checkpoint's, or ``all``."""
        self.going_on_from: Path | None = None
        """The checkpoint to resume from, where it is known before it is loaded; so what cannot be
        resumed is refused before an engine starts.
        """
        self.changes: list[Change] | None = None
        """Differences from the checkpoint's configuration, if the two were compared."""
        self.stopping: LightningRLError | None = None
        """Error to raise at the end of the iteration, after its row is written and all callbacks
        ran.
        """

    @LightningModule.trainer.setter  # type: ignore[attr-defined]
    def trainer(self, trainer: Trainer | None) -> None:
        """Attach the Trainer, before it looks for a checkpoint to go on from."""
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if isinstance(trainer, Trainer) and trainer.lightning_module is self:
            use_own_saver(trainer)

    @property
    def present_iteration(self) -> int:
        """The iteration that is being collected or trained, counted from 1.

        Rollouts, metrics, files and messages use this number; at the end of that iteration it
        equals ``iteration``. Row 0 of the metrics was recorded before the first iteration.
        """
        return self.iteration + 1

    @property
    def iteration_ended(self) -> bool:
        """True if an iteration ends with the Lightning batch that ends now."""
        return True

    @property
    def described_as(self) -> str:
        """Name of what is trained: the value of ``model`` in ``summary.json``."""
        return type(self).__name__

    @property
    def recorded(self) -> dict[str, float]:
        """Metrics recorded since the last row."""
        return dict(self._recorded)

    @property
    def learners(self) -> list[str]:
        """Names of the learners if there are several; each one's metrics contain its name."""
        return []

    def names_of(self, metric: str) -> list[str]:
        """Return the names under which a metric is recorded: its own, and one per learner."""
        return [metric, *(named(metric, name) for name in self.learners)]

    def record(self, metrics: dict[str, float]) -> None:
        """Add metrics to this iteration's row; callbacks use this instead of ``self.log``.

        They reach ``trainer.callback_metrics`` at once (``ModelCheckpoint(monitor=...)`` works) and
        the loggers in one call when the iteration ends.
        """
        self._recorded |= metrics
        self._show(metrics)

    def _show(self, metrics: dict[str, float]) -> None:
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value, device="cpu") for name, value in metrics.items()}
        )

    def flush_metrics(self) -> None:
        """Write the row of recorded metrics to every logger, at step ``iteration``."""
        if self._recorded:
            metrics, self._recorded = self._recorded, {}
            self._written = self.iteration
            self._show(metrics)  # a resumed run's first row was recorded by the run before
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=self.iteration)
            call_hook(self.trainer, "on_iteration_end", metrics)
            if not self.automatic_optimization:  # else Lightning steps them
                step_plateaus((c.scheduler for c in self.trainer.lr_scheduler_configs), metrics)
        if self.stopping is not None:
            error, self.stopping = self.stopping, None
            raise error

    def validation_step(self, batch: dict[str, float], batch_idx: int) -> None:
        """Log ``eval/*`` of the held-out tasks (``lightning-rl validate`` and ``test``)."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"{type(self).__name__} is evaluated by its data module, but got a batch of type "
                f"{type(batch).__name__}; pass trainer.validate datamodule=... instead of a "
                "DataLoader"
            )
        self.log_dict(batch, batch_size=1, sync_dist=True)

    test_step = validation_step

    def stateful_parts(self) -> dict[str, Any]:
        """Return the parts other than the weights that change during training, each with a
        ``state_dict``.
        """
        return {}

    def state_of_parts(self) -> dict[str, Any]:
        """Return the ``state_dict`` of each stateful part, for a checkpoint."""
        return {name: part.state_dict() for name, part in self.stateful_parts().items()}

    def load_parts(self, states: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_of_parts`."""
        for name, part in self.stateful_parts().items():
            if name in states:  # else it is new in this configuration, and starts afresh
                part.load_state_dict(states[name])

    def random_states(self) -> list[dict[str, Any]]:
        """Return the random states of every rank from which a resumed run goes on."""
        return gather_random_states()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Most checkpoints are taken before the iteration's row is written.
        checkpoint["lightning_rl"] = {
            "iteration": self.iteration,
            "recorded": self._recorded,
            "written": self._written,
            "parts": self.state_of_parts(),
            "stages": list(self.clock.seconds),
            "random": self.random_states(),
            "run": {
                "id": self.run_id,
                "configuration": configuration_of(self),
                "day": self.day.date,
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["lightning_rl"]
        check_resume(self, checkpoint)
        self.iteration, self._recorded = state["iteration"], dict(state["recorded"])
        self.day.date = state.get("run", {}).get("day", self.day.date)
        self.load_parts(state["parts"])
        self._written = state.get("written", -1)
        for stage in state.get("stages", ()):  # one of a user's own, whose column has no gaps
            self.clock.seconds.setdefault(stage, 0.0)
        self._restored = state

    # Lightning runs these after the callbacks' own, so one row holds what all of them recorded.
    def on_train_start(self) -> None:
        state, self._restored = self._restored, None
        self.going_on_from = None
        if not self.trainer.ckpt_path:  # weights of another run, perhaps, but this one is new
            state = None
        if state is not None:
            use_new_optimizer_settings(self)
        if state is not None and self._written == self.iteration:
            # What the resumed run measured so far is in that row already, and what the checkpoint
            # holds belongs to the next.
            self._recorded = dict(state["recorded"])
        else:
            self.flush_metrics()
        # Last of all: starting an engine has drawn on them, or reseeded them.
        if state is not None and "random" in state:
            restore_random_states(state["random"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.iteration_ended:
            self.flush_metrics()


class LanguageModule(RecordingModule):
    """A module that trains language models."""

    model: str

    @property
    def described_as(self) -> str:
        """Directory or hub name of the model."""
        return str(self.model)

    def require_packed(self, batch: Any) -> None:
        """Check that a batch consists of packed rollouts.

        Raises:
            ConfigError: if it contains anything else, such as rows of a data set.
        """
        if not isinstance(batch, TensorDict) or not {"tokens", "rollouts"} <= set(batch.keys()):
            raise ConfigError(
                f"{type(self).__name__} trains on packed rollouts, but got a batch of type "
                f"{type(batch).__name__}; pass trainer.fit a data module that packs rows "
                "(RLDataModule, SFTDataModule, PairDataModule) instead of a DataLoader"
            )

    @property
    def strict_loading(self) -> bool:
        """False if shards are read before a LoRA's base can be restored, since they already hold
        it.
        """
        shards = isinstance(getattr(self._trainer, "strategy", None), ModelParallelStrategy)
        return self._strict_loading in (None, True) and not (shards and adapted(self))

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        self._strict_loading = strict_loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        leave_out_base(self, checkpoint)
        super().on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        put_back_base(self, checkpoint)
        super().on_load_checkpoint(checkpoint)

    @property
    @abstractmethod
    def loaded_policies(self) -> dict[str, Policy]:
        """The policies by name, once ``configure_model`` has loaded them; a single one has the name
        "".
        """


class LearningModule(LanguageModule):
    """A module whose policy is a language model."""

    def __init__(
        self,
        model: str,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        loading: Loading,
        lora: LoRA | None = None,
        vision: Vision | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loading = loading
        self.lora = lora
        self.vision = vision
        self.policy: Policy | None = None

    @property
    def loaded_policies(self) -> dict[str, Policy]:
        return {"": self.loaded_policy}

    @property
    def loaded_policy(self) -> Policy:
        """The policy, once ``configure_model`` has loaded it.

        Raises:
            ConfigError: if it is not loaded yet.
        """
        if self.policy is None:
            raise ConfigError("the model is not loaded yet; call configure_model() first")
        return self.policy
