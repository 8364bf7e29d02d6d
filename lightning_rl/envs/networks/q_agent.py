"""QAgent: an agent whose head values each action, and that takes the best."""

from typing import Any

from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.agent import Observations
from lightning_rl.envs.networks.bodies import Body, MLPBody
from lightning_rl.envs.networks.exploring import (
    EpsilonGreedy,
    ExploringAgent,
    require_no_memory,
    single_action,
)
from lightning_rl.envs.networks.layers import output
from lightning_rl.envs.networks.space import Discrete, Space, allowed_only, mask_of
from lightning_rl.errors import ConfigError
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule


class QHead(nn.Module):
    """Computes values of n actions from features, with one linear layer."""

    def build(self, features: int, actions: int) -> None:
        """Create the layers."""
        self.layer = output(features, actions)

    def forward(self, features: Tensor) -> Tensor:
        """Return values (*B, n) of features (*B, F)."""
        values: Tensor = self.layer(features)
        return values


class DuelingHead(QHead):
    """The value of a state plus each action's advantage (Wang et al. 2016, eq. 9)."""

    def build(self, features: int, actions: int) -> None:
        super().build(features, actions)
        self.state_layer = output(features, 1)

    def forward(self, features: Tensor) -> Tensor:
        added = super().forward(features)
        values: Tensor = self.state_layer(features) + added - added.mean(-1, keepdim=True)
        return values


@configurable
class QAgent(ExploringAgent):
    """An agent for a choice of n actions; an observation ``<action>_mask`` may forbid some.

    Args:
        body: computes the features for values.
        head: computes the values.
        body_lr: factor on the optimizer's learning rate for ``body``.
        critic_lr: the same for ``head``.
        schedule: decides in which iterations it learns.
        pretrained: a checkpoint of a ``SoloModule``, whose body initialises this one.

    Raises:
        ConfigError: for values out of range, or a body with a memory; when built, for actions that
            are not a choice of n.
    """

    def __init__(
        self,
        body: Body | None = None,
        head: QHead | None = None,
        body_lr: float = 1.0,
        critic_lr: float = 1.0,
        schedule: UpdateSchedule = EveryIteration(),
        pretrained: str | None = None,
    ) -> None:
        super().__init__(schedule, pretrained, {"body_lr": body_lr, "critic_lr": critic_lr})
        require_no_memory(body=body)
        self.body = body if body is not None else MLPBody([128, 128], "relu")
        self.head = head if head is not None else QHead()

    def build(self, space: Space) -> None:
        self.space = space
        self.action, kind = single_action(space, "QAgent")
        if not isinstance(kind, Discrete):
            raise ConfigError(
                f"QAgent compares the values of n actions, but the environment takes "
                f"{type(kind).__name__} ones; use SACModule for real numbers, else ActorCritic"
            )
        self.one_hot = kind.one_hot
        self.head.build(self.body.build(space), kind.n)
        self.take_pretrained()

    def forward(self, observations: Observations) -> Tensor:
        """Return values (*B, n) of all actions; -inf for those that are not allowed."""
        values = self.head(self.body(observations))
        return allowed_only(values, observations.get(mask_of(self.action)))

    def act(
        self, observations: Observations, state: Tensor | None = None
    ) -> tuple[dict[str, Any], Tensor | None]:
        values = self(observations)
        return {self.action: EpsilonGreedy(values, self.one_hot, self.exploration)}, state

    def parts(self) -> dict[str, list[nn.Parameter]]:
        return {"body": list(self.body.parameters()), "critic": list(self.head.parameters())}

    def separate_parts(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]
