"""EnvAgent: what acts in an environment, however it is made and whatever it learns from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.envs.networks.bodies import Body
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.envs.networks.space import Space
from lightning_rl.learn.update_schedules import UpdateSchedule

Observations = Mapping[str, Tensor]


class EnvAgent(nn.Module, ABC):
    """One agent, or a group of alike agents that share it.

    It is made without sizes, so that a configuration can hold it; ``build`` makes its layers when
    the environment is known. ``body`` makes the features that its actions are made of, ``schedule``
    says in which iterations it learns.
    """

    body: Body
    schedule: UpdateSchedule
    space: Space | None = None

    @abstractmethod
    def build(self, space: Space) -> None:
        """Make all layers.

        Raises:
            ConfigError: if a part does not fit the environment.
        """

    @abstractmethod
    def act(
        self, observations: Observations, state: Tensor | None = None
    ) -> tuple[dict[str, ActionDistribution], Tensor | None]:
        """Distributions of actions by name, for one step of E environments; and the memory."""

    @abstractmethod
    def separate_parts(self) -> list[list[nn.Parameter]]:
        """All parameters, in parts that share no weights: gradients are clipped part by part."""

    @abstractmethod
    def parameter_groups(self, name: str) -> Iterator[dict[str, Any]]:
        """Parameters by what they are for, each with a ``name`` and its ``lr_factor``."""

    def snapshot(self) -> dict[str, Any]:
        """All that its actions depend on: copies of tensors, on the CPU, and primitives."""
        return {"weights": {n: w.detach().cpu().clone() for n, w in self.state_dict().items()}}

    def become(self, snapshot: Mapping[str, Any]) -> None:
        """Act as the agent of which the snapshot was taken."""
        self.load_state_dict(snapshot["weights"])

    @property
    def state_size(self) -> int:
        """Numbers of its memory; 0: it has none."""
        return self.body.state_size if isinstance(self.body, RecurrentBody) else 0

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.parameters()).device

    def begin(self, environments: int) -> Tensor:
        """An empty memory, (E, *A, S)."""
        assert self.space is not None
        agents = [self.space.agents] if self.space.agents else []
        return torch.zeros(environments, *agents, self.state_size, device=self.device)
