"""Guards: each watches one number in every iteration, and acts when it leaves its bound.

Actions come first, from a line in the log to the end of the run.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.correction import Correction, TokenTIS
from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, GuardError, require_at_least, require_finite
from lightning_rl.learn.base import RecordingModule
from lightning_rl.module import PolicyModule
from lightning_rl.run.dist import gather

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """A bound that was broken, while something can be done about it.

    ``batch`` is what the update is about to train on, None if it is over. ``offenders`` tells which
    tokens, (T,), broke the bound by themselves.
    """

    module: RecordingModule
    batch: TensorDict | None
    offenders: Callable[[], Tensor]
    reason: str


class GuardAction(ABC):
    """Taken by a guard in every iteration in which it goes off; it also logs a warning.

    ``changes_update``: it comes too late once the update is over, when only ``stop`` of a decision
    is heeded.
    """

    changes_update: ClassVar[bool] = False

    @abstractmethod
    def act(self, finding: Finding) -> Decision | None:
        """Act, or decide about the update."""


@dataclass(frozen=True)
class Warn(GuardAction):
    """Only the warning in the log."""

    def act(self, finding: Finding) -> None:
        """The guard has logged it already."""


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
    """Takes the tokens that break the bound by themselves out of the loss.

    If none is left, there is no update.
    """

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> Decision:
        return Decision(mask=finding.offenders())


@dataclass(frozen=True)
class SkipUpdate(GuardAction):
    """Leaves this batch's update out: no optimizer steps, the iteration is counted all the same."""

    changes_update: ClassVar[bool] = True

    def act(self, finding: Finding) -> Decision:
        return Decision(skip=True)


@dataclass(frozen=True)
class StopRun(GuardAction):
    """Leaves the update out if it is still to come, saves, and ends the run with a ``GuardError``.

    ``IterationCheckpoint`` is what saves.
    """

    def act(self, finding: Finding) -> Decision:
        return Decision(stop=GuardError(finding.reason))


@configurable
@dataclass(eq=False, repr=False)
class Guard(RLCallback, ABC):
    """Compares one number per iteration with a bound, and acts when it is broken.

    Records ``guard/<name>_value``, ``guard/<name>`` (1: broken) and ``guard/<name>_acted``, and
    logs a warning when it goes off. A value that is not a number breaks every bound. All ranks of a
    run act alike: where their values differ, it is the first that breaks the bound which counts.
    Derive from :class:`BatchGuard` for a number of your own; :class:`MetricGuard` takes any metric.

    Args:
        bound: the last value that is still good.
        action: what to do; a :class:`GuardAction`.
        patience: iterations in a row that break the bound before it acts.

    Raises:
        ConfigError: for a patience below 1, or an action that would come too late.
        GuardError: when ``StopRun`` has ended the run.
    """

    reruns = True
    name: str = field(init=False)
    what: str = field(init=False)
    """The number, in words."""
    fix: ClassVar[str] = "look at some rollouts"
    """Advice to a person."""
    before_update: ClassVar[bool]
    """True where it is known before the update."""

    bound: float
    action: GuardAction = Warn()
    patience: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, patience=self.patience)
        require_finite(bound=self.bound)
        if self.action.changes_update and not self.before_update:
            raise ConfigError(
                f"{type(self).__name__} knows its value only after the update, so "
                f"action={type(self.action).__name__} comes too late; use Warn or StopRun"
            )
        if isinstance(self.action, Mask) and type(self).offenders is Guard.offenders:
            raise ConfigError(
                f"{type(self).__name__} looks at a batch as a whole, so action=Mask has nothing to "
                "take out; use another action"
            )
        self._in_a_row: dict[str, int] = {}  # by the policy's name

    @property
    def broken(self) -> int:
        """Iterations in a row, up to the last, that broke the bound; of policies, the most."""
        return max(self._in_a_row.values(), default=0)

    @property
    def state_key(self) -> str:
        # Several guards of a class may watch different bounds.
        return self._generate_state_key(name=self.name, bound=self.bound)

    def breaks(self, value: float) -> bool:
        """Whether a value is bad."""
        return not value <= self.bound

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        """The offending tokens, (T,), which ``Mask`` removes. Override it to allow that."""
        raise NotImplementedError

    def judge(
        self, module: RecordingModule, value: float | None, batch: TensorDict | None
    ) -> Decision | None:
        """Record a value, and act on it; all ranks must call this, with a value or None."""
        values = [v for v in gather(value) if v is not None]
        if not values:
            return None
        # A rank that skips an update by itself would leave the others waiting for its gradients.
        value = next((v for v in values if self.breaks(v)), values[0])
        broken = self._in_a_row.get(module.name, 0) + 1 if self.breaks(value) else 0
        self._in_a_row[module.name] = broken
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

        def offenders() -> Tensor:
            assert batch is not None
            assert isinstance(module, PolicyModule)  # only a BatchGuard's batch comes here
            return self.offenders(module, batch)

        return self.action.act(Finding(module, batch, offenders, reason))

    def state_dict(self) -> dict[str, Any]:
        return {"broken": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict["broken"]


class BatchGuard(Guard, ABC):
    """A guard of the batch before its update; every action is in time. Override ``measure``."""

    before_update = True
    language_only = True

    @abstractmethod
    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        """The number, best of all ranks' batches together; None if there is nothing to measure.

        A number for this rank's batch alone suffices: the ranks combine theirs.
        """

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision | None:
        module = self.policy_module_of(pl_module)
        return self.judge(module, self.measure(module, batch), batch)


@configurable
class MetricGuard(Guard):
    """A guard of any metric that an iteration records; ``Warn`` and ``StopRun`` are in time.

    Where several policies record it, of each: ``policy/kl_old`` is also ``policy/prover/kl_old``.

    Args:
        metric: its name, such as ``policy/grad_norm``; ``policy_grad_norm`` is the guard's.
        bound: the largest value that is still good.
    """

    before_update = False
    what = "the metric"

    def __init__(
        self, metric: str, bound: float, action: GuardAction = Warn(), patience: int = 1
    ) -> None:
        super().__init__(bound, action, patience)
        self.metric = metric
        self.name = metric.replace("/", "_")
        self.what = metric
        self._measured = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = self.module_of(pl_module)
        values = [v for n, v in module.recorded.items() if n in module.names_of(self.metric)]
        # Of several policies the first that is bad.
        value = next(filter(self.breaks, values), values[0] if values else None)
        self._measured = self._measured or value is not None
        decision = self.judge(module, value, None)
        if decision is not None:
            module.stopping = module.stopping or decision.stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._measured:
            _log.warning(
                "%s had nothing to watch: no %r was recorded (before it in the list of callbacks)",
                type(self).__name__,
                self.metric,
            )


class MetricFloorGuard(MetricGuard):
    """The same with a lower bound: the smallest value that is still good."""

    def breaks(self, value: float) -> bool:
        return not value >= self.bound


@configurable
class KLGuard(MetricGuard):
    """Mean divergence per token, in nats: of the update from the policy before it.

    With ``metric: policy/kl_ref``, from the reference (needs ``model.kl``).
    """

    fix = "lower lr or ppo_epochs, or add a KL penalty"

    def __init__(
        self,
        bound: float = 0.1,
        metric: str = "policy/kl_old",
        action: GuardAction = Warn(),
        patience: int = 1,
    ) -> None:
        super().__init__(metric, bound, action, patience)


@configurable
class EntropyGuard(MetricFloorGuard):
    """Mean entropy per token, in nats: near zero, the policy tries nothing new."""

    fix = "lower lr, or add an entropy bonus or a KL penalty"

    def __init__(
        self, bound: float = 0.01, action: GuardAction = Warn(), patience: int = 3
    ) -> None:
        super().__init__("policy/entropy", bound, action, patience)


@configurable
class NonFiniteGuard(MetricGuard):
    """Optimizer steps whose gradient is NaN or infinite, which ``PolicyModule`` leaves out itself.

    A guard adds the action: an alarm in every iteration with such a step, or the end of the run.
    """

    what = "the number of optimizer steps left out for a gradient that is NaN or infinite"
    fix = "look for extreme logprobs or advantages; lower lr"

    def __init__(self, action: GuardAction = Warn(), patience: int = 1) -> None:
        super().__init__("policy/nonfinite_skipped", 0, action, patience)
        self.name = "non_finite"
        self.what = type(self).what
