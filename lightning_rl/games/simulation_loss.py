"""SimulationLoss: a simulator learns to imitate an adversary, which learns not to be imitated."""

from collections.abc import Mapping

from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.step_loss import JointLoss
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.games.protocols.zero_knowledge import ADVERSARY, SIMULATOR, likeness


@configurable
class SimulationLoss(JointLoss):
    """Trains the simulator of a :class:`ZeroKnowledge` to imitate the adversary, and vice versa.

    A policy gradient compares the reward of an action with that of others in its place. A
    simulator's actions change nothing: it is paid for the logits l' that it samples from, as its
    adversary is for its own, l. So both also follow the gradient of their own payment,
    r = cos(l, l') summed over message and decision: the simulator ascends with l held fixed, the
    adversary descends with l' held fixed. This is the pathwise part of the gradient of their
    rewards; how an adversary's words affect later messages is left to the policy gradient.

    Args:
        coef: the weight of this loss.

    Raises:
        ConfigError: if ``coef`` is negative or not finite.
    """

    agents = (ADVERSARY, SIMULATOR)

    def __init__(self, coef: float = 1.0) -> None:
        require_at_least(0, coef=coef)
        require_finite(coef=coef)
        self.coef = coef

    def __call__(
        self, made: Mapping[str, Mapping[str, ActionDistribution]]
    ) -> tuple[Tensor, Metrics]:
        adversary, simulator = (_logits(made[name]) for name in self.agents)
        fixed = [[value.detach() for value in own] for own in (adversary, simulator)]
        loss = likeness(adversary, fixed[1]) - likeness(fixed[0], simulator)
        alike = likeness(*fixed) / len(adversary)
        return self.coef * loss, {"likeness": alike}


def _logits(made: Mapping[str, ActionDistribution]) -> list[Tensor]:
    return [distribution.logits for _, distribution in sorted(made.items())]  # type: ignore[attr-defined]
