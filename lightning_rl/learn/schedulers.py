"""Learning-rate schedules with a linear warm-up, per optimizer step, for ``lr_scheduler``; and what
every schedule goes through.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau as Plateau

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite


@configurable
class WarmupConstant(LambdaLR):
    """Linear warm-up to the optimizer's learning rate over ``warmup_steps``, then constant.

    Args:
        warmup_steps: optimizer steps until the whole learning rate is reached.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0) -> None:
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        """Return the factor from ``warmup_steps`` on; override it for another shape."""
        return 1.0


@configurable
class WarmupLinear(WarmupConstant):
    """Linear warm-up, then linear decay to ``final`` times the learning rate at ``total_steps``.

    Args:
        total_steps: optimizer steps until the end of the decay, warm-up included.
        warmup_steps: optimizer steps until the whole learning rate is reached.
        final: share of the learning rate that is left from then on.

    Raises:
        ConfigError: if ``total_steps`` is not above ``warmup_steps``, or ``final`` not finite.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0
    ) -> None:
        if total_steps <= warmup_steps:
            raise ConfigError(
                f"total_steps={total_steps} must be > warmup_steps={warmup_steps}; raise it, or "
                "lower warmup_steps"
            )
        require_finite(final=final)
        self.total_steps = total_steps
        self.final = final
        super().__init__(optimizer, warmup_steps)

    def after_warmup(self, step: int) -> float:
        return self.final + (1 - self.final) * self.shape(self.progress(step))

    def progress(self, step: int) -> float:
        """Return the completed share of the decay, in [0, 1]."""
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return min(1.0, done)

    def shape(self, progress: float) -> float:
        """Return the shape of the decay: 1 at progress 0, 0 at progress 1."""
        return 1.0 - progress


class WarmupCosine(WarmupLinear):
    """Linear warm-up, then half a cosine down to ``final`` times the learning rate."""

    def shape(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


MOST_STEPS = 200_000
"""Steps of a schedule that are tried before a run, which takes seconds."""


def make_scheduler(make: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    """Return an optimizer's schedule.

    Raises:
        ConfigError: if ``make`` returns anything else, or a schedule that needs a metric without
            naming it.
    """
    made: Any = make(optimizer)
    if isinstance(made, Plateau) and monitor_of(made) is None:
        raise ConfigError(
            f"lr_scheduler={type(made).__name__} needs the name of a metric; set class_path: "
            "lightning.pytorch.cli.ReduceLROnPlateau, with a monitor such as reward/mean, and the "
            "mode, min or max"
        )
    if not isinstance(made, LRScheduler):  # of which a plateau is one
        raise ConfigError(
            f"lr_scheduler returned {made!r:.80}, which is no learning-rate schedule; return one "
            "of torch.optim.lr_scheduler, made with the optimizer that it is called with"
        )
    return made


def throwaway_scheduler(
    make: Callable[[Optimizer], Any], optimizer: Callable[[Any], Optimizer]
) -> Any:
    """Return a schedule of a parameter that nobody trains, to see what it does.

    Raises:
        ConfigError: if it cannot be made.
    """
    return make_scheduler(make, optimizer([nn.Parameter(torch.zeros(1, 1))]))


def automatic(scheduler: Any) -> dict[str, Any]:
    """Return how Lightning is to step a schedule in automatic optimisation.

    One that follows a metric steps when an epoch ends, after its validation.
    """
    if isinstance(scheduler, Plateau):
        return {"scheduler": scheduler, "interval": "epoch", "monitor": monitor_of(scheduler)}
    return {"scheduler": scheduler, "interval": "step"}


def monitor_of(scheduler: Any) -> str | None:
    """Return the metric that a schedule follows, as Lightning's ``ReduceLROnPlateau`` does."""
    return getattr(scheduler, "monitor", None) if isinstance(scheduler, Plateau) else None


def step_scheduler(scheduler: Any) -> None:
    """Advance a schedule that counts optimizer steps.

    Raises:
        ConfigError: if it has no further step.
    """
    if isinstance(scheduler, Plateau):
        return
    try:
        scheduler.step()
    except ValueError as error:
        raise _ended(scheduler, error) from error


def step_plateaus(schedulers: Iterable[Any], metrics: Mapping[str, float]) -> None:
    """Advance the schedules whose metric is among those of an iteration."""
    for scheduler in schedulers:
        monitor = monitor_of(scheduler)
        if monitor is not None and math.isfinite(metrics.get(monitor, math.nan)):
            scheduler.step(metrics[monitor])


def check_scheduler(
    make: Callable[[Optimizer], Any], optimizer: Callable[[Any], Optimizer], steps: int
) -> None:
    """Try a schedule for as many optimizer steps as a run has, on a throwaway parameter.

    Raises:
        ConfigError: if it cannot be made, or ends before the run does.
    """
    scheduler = throwaway_scheduler(make, optimizer)
    with warnings.catch_warnings():  # that the optimizer has not stepped
        warnings.simplefilter("ignore")
        for step in range(min(steps, MOST_STEPS)):
            try:
                step_scheduler(scheduler)
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; the run takes up to {steps} steps, and the schedule ends "
                    f"after {step}"
                ) from error


def check_automatic(module: Any) -> None:
    """Try the schedule of a module that Lightning optimises, once it knows the number of batches.

    Raises:
        ConfigError: if it ends before the run does.
    """
    trainer = module.trainer
    windows = trainer.num_training_batches / trainer.accumulate_grad_batches
    if module.lr_scheduler is None or not math.isfinite(windows):
        return
    epochs = trainer.max_epochs
    bounds = [trainer.max_steps] if trainer.max_steps >= 0 else []
    bounds += [epochs * math.ceil(windows)] if epochs is not None and epochs >= 0 else []
    check_scheduler(module.lr_scheduler, module.optimizer, min(bounds, default=1))


def _ended(scheduler: Any, error: ValueError) -> ConfigError:
    return ConfigError(
        f"lr_scheduler={type(scheduler).__name__} cannot make a further step ({error}); raise its "
        "total_steps to the optimizer steps of the whole run"
    )
