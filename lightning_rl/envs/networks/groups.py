"""Bodies for groups of agents: separate weights, or a joint view."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.bodies import Body, MLPBody, flattened
from lightning_rl.envs.networks.space import Observed, Space
from lightning_rl.errors import ConfigError


@configurable
class PerAgent(Body):
    """A separate body for each agent of a group, instead of a shared one.

    Args:
        body: the body that is copied for each agent, with its own weights.
    """

    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        self.body = body if body is not None else MLPBody()

    def build(self, space: Space) -> int:
        if not space.agents:
            raise ConfigError(
                "PerAgent is for groups of agents, but this environment has a single agent"
            )
        made = [copy.deepcopy(self.body) for _ in range(space.agents)]
        del self.body
        single = replace(space, agents=0)
        sizes = [body.build(single) for body in made]
        self.bodies = nn.ModuleList(made)
        self._agent_dim = {n: -1 - len(o.shape) for n, o in space.observations.items()}
        return sizes[0]

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        known = {n: value for n, value in observations.items() if n in self._agent_dim}
        features = [
            body({n: value.select(self._agent_dim[n], agent) for n, value in known.items()})
            for agent, body in enumerate(self.bodies)
        ]
        return torch.stack(features, -2)


@configurable
class Centralized(Body):
    """Reads the observations of all agents of a group, and gives each agent the same features.

    As the body of a critic, it turns IPPO into MAPPO (Yu et al. 2022).

    Args:
        hidden: widths of its layers.
        activation: activation after each layer.
        observations: names of the observations to read; None: all.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        activation: str = "tanh",
        observations: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.body = MLPBody(hidden, activation, observations)

    def build(self, space: Space) -> int:
        if not space.agents:
            raise ConfigError(
                "Centralized is for groups of agents, but this environment has a single agent"
            )
        self.agents = space.agents
        self._read = space.observed(self.body.observations, "Centralized")
        size = self.agents * sum(observed.size for observed in self._read.values())
        joint = Space({"joint": Observed((size,))}, {})
        self.body.observations = None
        return self.body.build(joint)

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        joint = flattened(observations, self._read).flatten(-2)
        features = self.body({"joint": joint})
        return features.unsqueeze(-2).expand(*features.shape[:-1], self.agents, -1)
