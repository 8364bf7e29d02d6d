"""SACAgent: a squashed normal policy, two critics of state and action, and a temperature."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.agent import Observations
from lightning_rl.envs.networks.bodies import Body, MLPBody
from lightning_rl.envs.networks.distributions import TanhGaussian
from lightning_rl.envs.networks.exploring import (
    ExploringAgent,
    PartlyUniform,
    require_no_memory,
    single_action,
)
from lightning_rl.envs.networks.layers import mlp, output, require_activation
from lightning_rl.envs.networks.policy_heads import TanhGaussianHead
from lightning_rl.envs.networks.space import Continuous, Space
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule


@configurable
class ActionCritic(nn.Module):
    """Q(s, a): layers over a body's features and the action, concatenated.

    Args:
        body: computes the features; None: the observations themselves.
        hidden: widths of the layers over both.
        activation: activation after each layer.

    Raises:
        ConfigError: for a width below 1, an unknown activation, or a body with a memory.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, body: Body | None = None, hidden: list[int] | None = None, activation: str = "relu"
    ) -> None:
        super().__init__()
        require_no_memory(body=body)
        require_activation(activation)
        self.hidden = [256, 256] if hidden is None else hidden
        require_at_least(1, **{f"hidden[{i}]": width for i, width in enumerate(self.hidden)})
        self.activation = activation
        self.body = body if body is not None else MLPBody([])

    def build(self, space: Space, action: Continuous) -> None:
        """Create the layers.

        Raises:
            ConfigError: if the body cannot read the environment's observations.
        """
        size = self.body.build(space) + action.size
        self.layers = mlp(size, self.hidden, self.activation)
        self.value_layer = output(self.hidden[-1] if self.hidden else size, 1)
        self.register_buffer("low", action.low.clone(), persistent=False)
        self.register_buffer("high", action.high.clone(), persistent=False)

    def forward(self, observations: Observations, action: Tensor) -> Tensor:
        """Return values (*B,) of actions (*B, D), which are first scaled from their bounds to [-1,
        1].
        """
        unit = 2 * (action - self.low) / (self.high - self.low) - 1
        seen = torch.cat([self.body(observations), unit], -1)
        values: Tensor = self.value_layer(self.layers(seen)).squeeze(-1)
        return values


@configurable
class SACAgent(ExploringAgent):
    """The agent of ``SACModule``, for real-valued actions within bounds.

    Args:
        body: computes the features for actions.
        policy: computes actions from them.
        critic: copied to two critics, with their own weights.
        temperature: initial temperature: the worth of 1 nat of entropy in rewards.
        target_entropy: entropy that the temperature is tuned to reach, in nats; None: -D for D
            actions scaled from their bounds to [-1, 1] (Haarnoja et al. 2018b).
        body_lr: factor on the optimizer's learning rate for ``body``.
        actor_lr: the same for ``policy``.
        critic_lr: the same for the critics.
        temperature_lr: the same for the temperature; 0 keeps it constant.
        schedule: decides in which iterations it learns.
        pretrained: a checkpoint of a ``SoloModule``, whose body initialises this one.

    Raises:
        ConfigError: for values out of range, or a body with a memory; when built, for actions that
            are not real numbers within bounds.
    """

    def __init__(
        self,
        body: Body | None = None,
        policy: TanhGaussianHead | None = None,
        critic: ActionCritic | None = None,
        temperature: float = 1.0,
        target_entropy: float | None = None,
        body_lr: float = 1.0,
        actor_lr: float = 1.0,
        critic_lr: float = 1.0,
        temperature_lr: float = 1.0,
        schedule: UpdateSchedule = EveryIteration(),
        pretrained: str | None = None,
    ) -> None:
        factors = {
            "body_lr": body_lr,
            "actor_lr": actor_lr,
            "critic_lr": critic_lr,
            "temperature_lr": temperature_lr,
        }
        super().__init__(schedule, pretrained, factors)
        require_no_memory(body=body)
        require_finite(temperature=temperature, target_entropy=target_entropy)
        if temperature <= 0:
            raise ConfigError(
                f"temperature={temperature} must be > 0; use e.g. 0.01 for almost none"
            )
        self.body = body if body is not None else MLPBody([256, 256], "relu")
        self.policy = policy if policy is not None else TanhGaussianHead()
        self._critic = (critic if critic is not None else ActionCritic(),)  # hidden until built
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.given_target = target_entropy

    def build(self, space: Space) -> None:
        self.space = space
        self.action, kind = single_action(space, "SACAgent")
        if not isinstance(kind, Continuous):
            raise ConfigError(
                f"SACAgent makes real numbers, but the environment takes {type(kind).__name__} "
                "actions; use DQNModule for a choice of n, else ActorCritic"
            )
        self.policy.build(self.body.build(space), kind)
        critics = [copy.deepcopy(self._critic[0]) for _ in range(2)]
        for critic in critics:
            critic.build(space, kind)
        self.critics = nn.ModuleList(critics)
        # Measured in the environment's units, actions are wider by half the distance of the bounds.
        wider = float((0.5 * (kind.high - kind.low)).log().sum())
        given = self.given_target
        self.target_entropy = wider - kind.size if given is None else given
        self.take_pretrained()

    def forward(self, observations: Observations) -> TanhGaussian:
        """Return the policy's distribution."""
        made: TanhGaussian = self.policy(self.body(observations), observations)
        return made

    def act(
        self, observations: Observations, state: Tensor | None = None
    ) -> tuple[dict[str, Any], Tensor | None]:
        made = self(observations)
        exploring = PartlyUniform(made, self.exploration) if self.exploration else made
        return {self.action: exploring}, state

    def parts(self) -> dict[str, list[nn.Parameter]]:
        return {
            "body": list(self.body.parameters()),
            "actor": list(self.policy.parameters()),
            "critic": list(self.critics.parameters()),
            "temperature": [self.log_temperature],
        }

    def separate_parts(self) -> list[list[nn.Parameter]]:
        body, actor, critic, temperature = self.parts().values()
        return [body + actor, critic, temperature]
