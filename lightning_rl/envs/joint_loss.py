"""JointLoss: a loss of several agents' choices in the same steps."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.envs.networks.distributions import ActionDistribution


class JointLoss(ABC):
    """A loss of several agents' distributions, added to each agent's own loss.

    ``agents`` names them. They act in the same steps, and learn in the same iterations.
    """

    agents: Sequence[str]

    @abstractmethod
    def __call__(
        self, made: Mapping[str, Mapping[str, ActionDistribution]]
    ) -> tuple[Tensor, Metrics]:
        """Return the loss of each step, (*B,), and metrics (*B,); ``made``: by agent and action."""
