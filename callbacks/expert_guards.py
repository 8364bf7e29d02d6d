"""Guards of a mixture of experts: experts that get no tokens, and experts that get most of them."""

from lightning_rl.callbacks.guards import GuardAction, MetricGuard, Warn
from lightning_rl.config.arguments import configurable


@configurable
class DeadExpertGuard(MetricGuard):
    """The share of experts, over all layers, that got no token of an update.

    Args:
        bound: the largest acceptable share. Small batches miss some experts by chance.
    """

    what = "the share of experts without a token"
    fix = "raise model.balance, lower lr, or let more tokens count: groups_per_iteration"

    def __init__(self, bound: float = 0.1, action: GuardAction = Warn(), patience: int = 3) -> None:
        super().__init__("experts/dead_share", bound, action, patience)
        self.name, self.what = "dead_experts", type(self).what


@configurable
class ExpertOverloadGuard(MetricGuard):
    """The load of the busiest expert of any layer, in multiples of an even share.

    Args:
        bound: the largest acceptable multiple; its maximum is the number of experts divided by the
            number of experts per token.
    """

    what = "the busiest expert's multiple of an even share"
    fix = "raise model.balance, or lower lr"

    def __init__(self, bound: float = 4.0, action: GuardAction = Warn(), patience: int = 3) -> None:
        super().__init__("experts/overload", bound, action, patience)
        self.name, self.what = "expert_overload", type(self).what
