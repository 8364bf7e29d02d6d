"""QAgent: an agent whose head values each action, and that takes the best (Mnih et al. 2015)."""

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.algos.schedules import LinearSchedule, Schedule, schedule_of
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
        epsilon: share of random actions: a number, or a schedule over iterations.
        loss: further arguments of torchrl's ``DQNLoss``, by default ``{double_dqn: true,
            loss_function: smooth_l1}``.
        body_lr: factor on the optimizer's learning rate for ``body``.
        critic_lr: the same for ``head``.
        options: ``schedule`` and ``pretrained``, see :class:`EnvAgent`.

    Raises:
        ConfigError: for values out of range, or a body with a memory; when built, for actions that
            are not a choice of n.
    """

    def __init__(
        self,
        body: Body | None = None,
        head: QHead | None = None,
        epsilon: float | Schedule = LinearSchedule(start=1.0, final=0.05, iterations=100),
        loss: dict[str, Any] | None = None,
        body_lr: float = 1.0,
        critic_lr: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(factors={"body_lr": body_lr, "critic_lr": critic_lr}, **options)
        require_no_memory(body=body)
        self.body = body if body is not None else MLPBody([128, 128], "relu")
        self.head = head if head is not None else QHead()
        self.epsilon = schedule_of(epsilon, "epsilon", 0, 1)
        self.loss = {"double_dqn": True, "loss_function": "smooth_l1"} | (loss or {})

    def build(self, space: Space) -> None:
        self.space = space
        self.action, kind = single_action(space, "QAgent")
        if not isinstance(kind, Discrete):
            raise ConfigError(
                f"QAgent compares the values of n actions, but the environment takes "
                f"{type(kind).__name__} ones; use SACAgent for real numbers, else ActorCritic"
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

    # ---------------------------------------------------------------- learning

    def explored_at(self, iteration: int) -> float:
        return self.epsilon.at(iteration)

    def torchrl_loss(self) -> tuple[str, dict[str, Any]]:
        kind = "one-hot" if self.one_hot else "categorical"
        return "torchrl.objectives.DQNLoss", {"value_network": _Values(self), "action_space": kind}

    @torch.no_grad()
    def measured(self, steps: TensorDict, found: TensorDict) -> dict[str, Tensor]:
        values = self(self.seen(steps))
        return {"value/loss": found["loss"], "value/mean": values.amax(-1).mean()}


class _Values(TensorDictModuleBase):
    """The agent in the form of a torchrl value network."""

    def __init__(self, agent: QAgent) -> None:
        super().__init__()
        assert agent.space is not None
        self.agent = agent
        self.in_keys = list(agent.space.observations)
        self.out_keys = ["action", "action_value", "chosen_action_value"]

    def forward(self, steps: TensorDict) -> TensorDict:
        """Add values and the best action to steps."""
        values = self.agent(self.agent.seen(steps))
        # Finite: torchrl multiplies what follows an end, where none may be allowed, by 0.
        values = values.clamp(min=torch.finfo(values.dtype).min)
        best = values.argmax(-1)
        steps["action"] = F.one_hot(best, values.shape[-1]) if self.agent.one_hot else best
        steps["action_value"] = values
        steps["chosen_action_value"] = values.amax(-1, keepdim=True)
        return steps
