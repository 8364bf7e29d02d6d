"""The guard: a rule that watches a number in every iteration, and acts when it crosses its bound.

The actions come first, from a line in the log to the end of the run; the library's own rules are in
:mod:`lightning_rl.callbacks.rules`.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.correction import Correction, TokenTIS
from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.samples import Stateful
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, GuardError, require_at_least, require_finite
from lightning_rl.learn.base import RecordingModule
from lightning_rl.module import PolicyModule
from lightning_rl.run.processes.dist import gather

_log = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Finding:
    """A bound that was crossed.

    ``batch`` is the batch that the update will train on, None if the update is over.
    """

    guard: "Guard"
    module: Any
    batch: TensorDict | None
    reason: str


class GuardAction(ABC):
    """A guard's action in every iteration in which it goes off, besides logging a warning.

    ``changes_update``: the action is too late after the update, when only ``stop`` of a decision is
    obeyed.
    """

    changes_update: ClassVar[bool] = False

    @abstractmethod
    def act(self, finding: Finding) -> Decision | None:
        """Act, or return a decision about the update."""


@dataclass(frozen=True)
class Warn(GuardAction):
    """Only logs the warning."""

    def act(self, finding: Finding) -> None:
        """Do nothing, since the guard has logged the warning."""


@configurable
@dataclass(frozen=True)
class Correct(GuardAction):
    """Trains on this batch with importance weights, whatever ``model.correction`` is.

    Args:
        correction: ``TokenTIS()`` (truncated importance sampling) or another.
    """

    correction: Correction = TokenTIS()
    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> Decision:
        return Decision(correction=self.correction)


@dataclass(frozen=True)
class Mask(GuardAction):
    """Removes the tokens that cross the bound by themselves from the loss.

    If none is left, there is no update.
    """

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> Decision:
        return Decision(mask=finding.guard.offenders(finding.module, finding.batch))


@dataclass(frozen=True)
class SkipUpdate(GuardAction):
    """Skips this batch's update: it makes no optimizer steps, but the iteration is counted."""

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> Decision:
        return Decision(skip=True)


@dataclass(frozen=True)
class StopRun(GuardAction):
    """Skips the update if it is still to come, saves, and ends the run with a ``GuardError``.

    ``IterationCheckpoint`` does the saving.
    """

    def act(self, finding: Finding) -> Decision:
        return Decision(stop=GuardError(finding.reason))


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def rule(cls: Class) -> Class:
    """Class decorator of a guard: its annotated attributes are arguments, checked as in YAML."""
    dataclass(eq=False, repr=False)(cls)  # changes it
    return configurable(cls)


@rule
class Guard(Stateful, RLCallback, ABC):
    """Compares one number per iteration with a bound, and acts when it is crossed.

    It records ``guard/<name>_value``, ``guard/<name>`` (1: crossed) and ``guard/<name>_acted``, and
    logs a warning when it goes off. NaN crosses every bound. All ranks of a run act alike: if their
    values differ, the first that crosses the bound counts. Derive from :class:`BatchGuard` for your
    own number, from :class:`IterationGuard` for one that is known after the update;
    :class:`MetricGuard` takes any metric.

    Args:
        bound: the last acceptable value.
        action: the action to take; a :class:`GuardAction`.
        patience: iterations in a row that cross the bound before it acts.

    Raises:
        ConfigError: if patience is below 1, or the action would be too late.
        GuardError: when ``StopRun`` has ended the run.
    """

    reruns = True
    state_names: ClassVar[tuple[str, ...]] = ("in_a_row",)
    name: str = field(init=False)
    what: str = field(init=False)
    """A description of the number, for the warning."""
    fix: ClassVar[str] = "look at some rollouts"
    """Advice for the user, for the warning."""
    floor: ClassVar[bool] = False
    """True if the bound is a lower one."""
    before_update: ClassVar[bool]
    """True if the number is known before the update."""

    bound: float
    action: GuardAction = Warn()
    patience: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, patience=self.patience)
        require_finite(bound=self.bound)
        if self.action.changes_update and not self.before_update:
            raise ConfigError(
                f"{type(self).__name__} knows its value only after the update, so "
                f"action={type(self.action).__name__} would be too late; use Warn or StopRun"
            )
        if isinstance(self.action, Mask) and type(self).offenders is Guard.offenders:
            raise ConfigError(
                f"{type(self).__name__} checks a batch as a whole, so action=Mask has nothing to "
                "remove; use another action"
            )
        self.in_a_row: dict[str, int] = {}
        """Iterations in a row, up to the last, that crossed the bound, by the policy's name."""

    @property
    def state_key(self) -> str:
        # Several guards of a class may watch different bounds.
        return self._generate_state_key(name=self.name, bound=self.bound)

    def breaks(self, value: float) -> bool:
        """Return True if a value crosses the bound."""
        return not (value >= self.bound if self.floor else value <= self.bound)

    def offenders(self, module: Any, batch: Any) -> Tensor:
        """Return a mask of the offending tokens, (T,), which ``Mask`` removes. Override it to allow
        that.
        """
        raise NotImplementedError

    def judge(
        self, module: RecordingModule, value: float | None, batch: TensorDict | None = None
    ) -> Decision | None:
        """Record a value, and act on it; all ranks must call this, with a value or None."""
        values = [v for v in gather(value) if v is not None]
        if not values:
            return None
        # A rank that skips an update by itself would leave the others waiting for its gradients.
        value = next(filter(self.breaks, values), values[0])
        broken = self.in_a_row.get(module.name, 0) + 1 if self.breaks(value) else 0
        self.in_a_row[module.name] = broken
        acts = broken >= self.patience
        key = f"guard/{self.name}"
        module.record({key: float(broken > 0), f"{key}_acted": float(acts), f"{key}_value": value})
        if not acts:
            return None
        at = module.iteration if batch is None else module.present_iteration
        reason = (
            f"{type(self).__name__} at iteration {at}: {self.what} "
            f"{f'of policy {module.name} ' if module.name else ''}is {value:.4g}, "
            f"bound={self.bound:g}; {self.fix}"
        )
        if broken == self.patience:  # once, until it has been good again
            _log.warning("%s (action: %s)", reason, type(self.action).__name__)
        return self.action.act(Finding(self, module, batch, reason))


class BatchGuard(Guard, ABC):
    """A guard of the batch before its update; every action is possible. Override ``measure``."""

    before_update = True
    language_only = True

    @abstractmethod
    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        """Return the number, or None if there is nothing to measure.

        It should cover all ranks' batches, but this rank's suffices: the ranks combine their
        values.
        """

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision | None:
        module = self.policy_module_of(pl_module)
        return self.judge(module, self.measure(module, batch), batch)


class IterationGuard(Guard, ABC):
    """A guard of a finished iteration: ``Warn`` and ``StopRun`` are possible. Override
    ``measure``.
    """

    before_update = False

    @abstractmethod
    def measure(self, module: RecordingModule) -> float | None:
        """Return the number, or None if there is nothing to measure."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = self.module_of(pl_module)
        if module.iteration_ended and (decision := self.judge(module, self.measure(module))):
            module.stopping = module.stopping or decision.stop


@configurable
class MetricGuard(IterationGuard):
    """A guard of any metric that an iteration records; it supports ``Warn`` and ``StopRun``.

    If several policies record it, each is checked: ``policy/kl_old`` is also
    ``policy/prover/kl_old``.

    Args:
        metric: its name, such as ``policy/grad_norm``; the guard is then ``policy_grad_norm``.
    """

    metric: str
    _measured = False

    def __init__(
        self, metric: str, bound: float, action: GuardAction = Warn(), patience: int = 1
    ) -> None:
        self.metric = metric
        super().__init__(bound, action, patience)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = getattr(self, "name", self.metric.replace("/", "_"))
        self.what = getattr(self, "what", self.metric)

    def measure(self, module: RecordingModule) -> float | None:
        values = [v for n, v in module.recorded.items() if n in module.names_of(self.metric)]
        self._measured = self._measured or bool(values)
        # Of several policies the first that is bad.
        return next(filter(self.breaks, values), values[0] if values else None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._measured:
            _log.warning(
                "%s had nothing to check: no %r was recorded", type(self).__name__, self.metric
            )


class MetricFloorGuard(MetricGuard):
    """A guard of a metric with a lower bound: the smallest acceptable value."""

    floor = True
