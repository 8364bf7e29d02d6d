"""Guards of a mixture of experts: experts that nothing is sent to, and such as get most of it."""

from lightning_rl.callbacks.guards import GuardAction, MetricGuard, Warn
from lightning_rl.config.arguments import configurable


@configurable
class DeadExpertGuard(MetricGuard):
    """Share of experts, over all layers, that no token of an update was sent to.

    Args:
        bound: the largest share that is still good. Small batches leave some out by chance.
    """

    what = "the share of experts without a token"
    fix = "raise model.balance, lower lr, or let more tokens count: groups_per_iteration"

    def __init__(self, bound: float = 0.1, action: GuardAction = Warn(), patience: int = 3) -> None:
        super().__init__("experts/dead_share", bound, action, patience)
        self.name, self.what = "dead_experts", type(self).what


@configurable
class ExpertOverloadGuard(MetricGuard):
    """Work of the busiest expert of any layer, in multiples of an even share.

    Args:
        bound: the largest multiple that is still good; the number of experts over that of a token's
            is the most that there can be.
    """

    what = "the busiest expert's multiple of an even share"
    fix = "raise model.balance, or lower lr"

    def __init__(self, bound: float = 4.0, action: GuardAction = Warn(), patience: int = 3) -> None:
        super().__init__("experts/overload", bound, action, patience)
        self.name, self.what = "expert_overload", type(self).what
