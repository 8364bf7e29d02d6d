"""SACAgent: a squashed normal policy, learned with critics of state and action (Haarnoja 2018)."""

import copy
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
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
from lightning_rl.errors import ConfigError, require_at_least


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
    """An agent for real-valued actions within bounds, soft actor-critic (Haarnoja et al. 2018b).

    Args:
        body: computes the features for actions.
        policy: computes actions from them.
        critic: copied to two critics, with their own weights.
        loss: further arguments of torchrl's ``SACLoss``, such as ``alpha_init``, the initial worth
            of 1 nat of entropy in rewards; by default ``loss_function: l2``, and a
            ``target_entropy`` of -D for D actions scaled from their bounds to [-1, 1].
        body_lr: factor on the optimizer's learning rate for ``body``.
        actor_lr: the same for ``policy``.
        critic_lr: the same for the critics.
        options: ``schedule`` and ``pretrained``, see :class:`EnvAgent`.

    Raises:
        ConfigError: for values out of range, or a body with a memory; when built, for actions that
            are not real numbers within bounds.
    """

    def __init__(
        self,
        body: Body | None = None,
        policy: TanhGaussianHead | None = None,
        critic: ActionCritic | None = None,
        loss: dict[str, Any] | None = None,
        body_lr: float = 1.0,
        actor_lr: float = 1.0,
        critic_lr: float = 1.0,
        **options: Any,
    ) -> None:
        factors = {"body_lr": body_lr, "actor_lr": actor_lr, "critic_lr": critic_lr}
        super().__init__(factors=factors, **options)
        require_no_memory(body=body)
        self.body = body if body is not None else MLPBody([256, 256], "relu")
        self.policy = policy if policy is not None else TanhGaussianHead()
        self._critic = (critic if critic is not None else ActionCritic(),)  # the loss has copies
        # A body may branch on what it sees, which vmap cannot.
        self.loss = {"loss_function": "l2", "deactivate_vmap": True} | (loss or {})

    def build(self, space: Space) -> None:
        self.space = space
        self.action, kind = single_action(space, "SACAgent")
        if not isinstance(kind, Continuous):
            raise ConfigError(
                f"SACAgent makes real numbers, but the environment takes {type(kind).__name__} "
                "actions; use QAgent for a choice of n, else ActorCritic"
            )
        self.policy.build(self.body.build(space), kind)
        # Measured in the environment's units, actions are wider by half the distance of the bounds.
        wider = float((0.5 * (kind.high - kind.low)).log().sum())
        self.loss = {"target_entropy": wider - kind.size, **self.loss}
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
        }

    # ---------------------------------------------------------------- learning

    def torchrl_loss(self) -> tuple[str, dict[str, Any]]:
        own = {"actor_network": _Actor(self), "qvalue_network": [_Value(self) for _ in range(2)]}
        return "torchrl.objectives.SACLoss", own

    def critic(self) -> ActionCritic:
        """Return a new critic."""
        assert self.space is not None
        [kind] = self.space.actions.values()
        assert isinstance(kind, Continuous)
        critic = copy.deepcopy(self._critic[0])
        critic.build(self.space, kind)
        return critic

    def further_parts(self, loss: Any) -> dict[str, list[nn.Parameter]]:
        temperature = [p for p in [loss.log_alpha] if isinstance(p, nn.Parameter)]
        critics = list(loss.qvalue_network_params.parameters())
        return {"critic": critics} | ({"temperature": temperature} if temperature else {})

    def measured(self, steps: TensorDict, found: TensorDict) -> dict[str, Tensor]:
        actor, alpha, entropy = (found[key].detach() for key in ("loss_actor", "alpha", "entropy"))
        return {
            "value/loss": found["loss_qvalue"],
            "value/mean": -actor - alpha * entropy,  # which the actor's loss is made of
            "policy/loss": actor,
            "policy/entropy": entropy,
            "policy/temperature": alpha,
        }


class _Actor(TensorDictModuleBase):
    """The agent in the form of a torchrl actor, which returns its distribution."""

    dist_sample_keys, log_prob_keys = ("action",), ("action_log_prob",)

    def __init__(self, agent: SACAgent) -> None:
        super().__init__()
        assert agent.space is not None
        self.agent = agent
        self.in_keys = list(agent.space.observations)
        self.out_keys = ["action"]

    def get_dist(self, steps: TensorDict) -> TanhGaussian:
        """Return the distribution of actions for some steps."""
        made: TanhGaussian = self.agent(self.agent.seen(steps))
        return made


class _Value(TensorDictModuleBase):
    """A new critic of an agent in the form of a torchrl value network."""

    def __init__(self, agent: SACAgent) -> None:
        super().__init__()
        assert agent.space is not None
        self.critic = agent.critic()
        self.in_keys = [*agent.space.observations, "action"]
        self.out_keys = ["state_action_value"]

    def forward(self, steps: TensorDict) -> TensorDict:
        """Add the values of the actions to steps."""
        *names, action = self.in_keys
        seen = {name: steps[name] for name in names}
        steps["state_action_value"] = self.critic(seen, steps[action]).unsqueeze(-1)
        return steps
