"""EnvAgent: the base class of everything that acts in an environment."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.bodies import Body
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.envs.networks.pretrained import take_body
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule

Observations = Mapping[str, Tensor]


@configurable
class EnvAgent(nn.Module, ABC):
    """One agent, or a group of similar agents that share it.

    It is created without sizes, so that a configuration can hold it; ``build`` creates its layers
    once the environment is known. ``body`` computes the features of its actions.

    Args:
        schedule: decides in which iterations it learns.
        pretrained: a checkpoint of a ``SoloModule``, whose body initialises this one.
        factors: factors on the optimizer's learning rate, as ``<part>_lr`` for any of ``parts``.

    Raises:
        ConfigError: for a factor below 0.
    """

    body: Body
    space: Space | None = None

    def __init__(
        self,
        schedule: UpdateSchedule = EveryIteration(),
        pretrained: str | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.pretrained = pretrained
        self.factors = factors or {}
        require_at_least(0, **self.factors)
        require_finite(**self.factors)

    @abstractmethod
    def build(self, space: Space) -> None:
        """Create all layers; then call ``take_pretrained``.

        Raises:
            ConfigError: if a part does not fit the environment.
        """

    def take_pretrained(self) -> None:
        """Initialise the body from the pretrained one, if there is one."""
        if self.pretrained is not None:
            take_body(self.body, Path(self.pretrained))

    @abstractmethod
    def act(
        self, observations: Observations, state: Tensor | None = None
    ) -> tuple[dict[str, ActionDistribution], Tensor | None]:
        """Return action distributions by name, for a step of E environments, and the new memory."""

    @abstractmethod
    def separate_parts(self) -> list[list[nn.Parameter]]:
        """Return all parameters in parts that share no weights; each part's gradient is clipped
        alone.
        """

    @abstractmethod
    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Return all parameters by their purpose, such as ``body``, ``actor`` and ``critic``."""

    def parameter_groups(
        self, name: str, parts: Mapping[str, list[nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Return a parameter group for each part, with a ``name`` and its ``lr_factor``."""
        return [
            {
                "params": part,
                "name": f"{name}/{kind}",
                "lr_factor": self.factors.get(f"{kind}_lr", 1.0),
            }
            for kind, part in parts.items()
            if part
        ]

    @property
    def state_size(self) -> int:
        """Size of its memory; 0 if it has none."""
        return self.body.state_size if isinstance(self.body, RecurrentBody) else 0

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.parameters()).device

    def begin(self, environments: int) -> Tensor:
        """Return an empty memory, (E, *A, S)."""
        assert self.space is not None
        agents = [self.space.agents] if self.space.agents else []
        return torch.zeros(environments, *agents, self.state_size, device=self.device)
