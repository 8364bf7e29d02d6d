"""Learning-rate schedules with a linear warm-up, per optimizer step, for ``lr_scheduler``."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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
