"""Bodies: what makes features of observations; one of one's own is a class with two methods."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.networks.space import Observed, Space

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
}


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """A layer with orthogonal weights and no bias to begin with (Andrychowicz et al. 2021)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: list[int], activation: str) -> nn.Sequential:
    """Linear layers of these widths, each followed by the activation."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


def require_activation(name: str) -> None:
    """Refuse an activation that there is not.

    Raises:
        ConfigError: naming those that there are.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation={name!r} must be one of {', '.join(ACTIVATIONS)}")


class Body(nn.Module, ABC):
    """Makes features of observations, for the heads of an agent.

    It is made without sizes, so that a configuration can hold it; ``build`` makes its layers when
    the environment is known.
    """

    @abstractmethod
    def build(self, space: Space) -> int:
        """Make the layers; returns F, how many features they give.

        Raises:
            ConfigError: if it cannot read what the environment shows.
        """

    @abstractmethod
    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Features (*B, F) of observations (*B, *shape) by name.

        B are environments, time, or steps that were drawn, and the agents of the group, if it has
        a dimension of them.
        """


@configurable
class MLPBody(Body):
    """Linear layers over all observations, flattened and side by side.

    Args:
        hidden: widths of the layers; none: the observations themselves are the features.
        activation: after each of them.
        observations: names of those to read; None: all.

    Raises:
        ConfigError: for a width below 1, or an activation that there is not.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        activation: str = "tanh",
        observations: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.hidden = [64, 64] if hidden is None else hidden
        require_at_least(1, **{f"hidden[{i}]": width for i, width in enumerate(self.hidden)})
        require_activation(activation)
        self.activation = activation
        self.observations = observations

    def build(self, space: Space) -> int:
        self._read = space.observed(self.observations, type(self).__name__)
        size = sum(observed.size for observed in self._read.values())
        self.layers = mlp(size, self.hidden, self.activation)
        return self.hidden[-1] if self.hidden else size

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        return self.layers(flattened(observations, self._read))


def flattened(observations: Mapping[str, Tensor], read: Mapping[str, Observed]) -> Tensor:
    """The named observations side by side, (*B, total size), as floats."""
    parts = []
    for name, observed in read.items():
        part = observations[name]
        if len(observed.shape) != 1:
            part = part.reshape(*part.shape[: part.ndim - len(observed.shape)], observed.size)
        parts.append(part if part.is_floating_point() else part.float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@configurable
class CNNBody(Body):
    """Convolutions over a picture, then a linear layer (Mnih et al. 2015, "Nature CNN").

    Args:
        channels: of each convolution.
        kernels: sizes of their windows.
        strides: their steps.
        hidden: width of the layer behind them.
        activation: after each layer.
        observation: the picture's name; None: the only one with three dimensions. Bytes are
            divided by 255; channels may come first or, as in gymnasium, last.

    Raises:
        ConfigError: for lists of different lengths, values below 1, or a picture that is too small.
    """

    def __init__(
        self,
        channels: list[int] | None = None,
        kernels: list[int] | None = None,
        strides: list[int] | None = None,
        hidden: int = 512,
        activation: str = "relu",
        observation: str | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels or [32, 64, 64]
        self.kernels = kernels or [8, 4, 3]
        self.strides = strides or [4, 2, 1]
        lengths = {len(self.channels), len(self.kernels), len(self.strides)}
        if len(lengths) > 1:
            raise ConfigError(
                f"CNNBody(channels={self.channels}, kernels={self.kernels}, "
                f"strides={self.strides}): each needs a value per convolution"
            )
        require_at_least(1, hidden=hidden)
        require_activation(activation)
        self.hidden = hidden
        self.activation = activation
        self.observation = observation

    def build(self, space: Space) -> int:
        self.name, shape = self._picture(space)
        self.last = shape[-1] <= 4 < shape[0]  # channels come last
        inputs = shape[-1] if self.last else shape[0]
        layers: list[nn.Module] = []
        for channels, kernel, stride in zip(self.channels, self.kernels, self.strides, strict=True):
            layers += [nn.Conv2d(inputs, channels, kernel, stride), ACTIVATIONS[self.activation]()]
            inputs = channels
        convolutions = nn.Sequential(*layers, nn.Flatten())
        picture = torch.zeros(1, *(shape[-1:] + shape[:-1] if self.last else shape))
        try:
            size = convolutions(picture).shape[1]
        except RuntimeError as error:
            raise ConfigError(
                f"CNNBody: a picture of {shape} is too small for kernels={self.kernels} with "
                f"strides={self.strides}; make them smaller"
            ) from error
        self.layers = nn.Sequential(
            convolutions, linear(size, self.hidden), ACTIVATIONS[self.activation]()
        )
        return self.hidden

    def _picture(self, space: Space) -> tuple[str, tuple[int, ...]]:
        if self.observation is not None:
            found = space.observed([self.observation], "CNNBody")
        else:
            found = space.observed(None, "CNNBody")
        pictures = {name: o.shape for name, o in found.items() if len(o.shape) == 3}
        if len(pictures) != 1:
            shapes = ", ".join(f"{name} {o.shape}" for name, o in found.items())
            raise ConfigError(
                f"CNNBody reads one observation with three dimensions, and there are "
                f"{len(pictures)} ({shapes}); name it with observation, or use MLPBody"
            )
        return next(iter(pictures.items()))

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        picture = observations[self.name]
        picture = picture / 255 if picture.dtype == torch.uint8 else picture.float()
        batch = picture.shape[:-3]
        flat = picture.reshape(-1, *picture.shape[-3:])
        if self.last:
            flat = flat.permute(0, 3, 1, 2)
        features: Tensor = self.layers(flat)
        return features.reshape(*batch, self.hidden)


class RecurrentBody(Body):
    """A body with a memory, which is empty when an episode begins.

    ``state_size``: how many numbers its memory of an environment is.
    """

    state_size: int

    @abstractmethod
    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Features (*B, F) of one step, and the memory (*B, S) after it."""

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a recurrent body goes from step to step: see unroll")

    def unroll(self, observations: Mapping[str, Tensor], state: Tensor, begins: Tensor) -> Tensor:
        """Features (L, N, *A, F) of clips of L steps, from their first memories (N, *A, S).

        ``begins`` (L, N): an episode begins at the step, without memory.
        """
        features = []
        for step in range(begins.shape[0]):
            fresh = begins[step].reshape(-1, *[1] * (state.ndim - 1))
            own = {name: value[step] for name, value in observations.items()}
            made, state = self.step(own, torch.where(fresh, torch.zeros_like(state), state))
            features.append(made)
        return torch.stack(features)


@configurable
class GRUBody(RecurrentBody):
    """A gated recurrent unit behind another body (Cho et al. 2014).

    Args:
        body: what it remembers the features of.
        hidden: size of its memory, and number of its features.

    Raises:
        ConfigError: for a size below 1, or a recurrent ``body``.
    """

    def __init__(self, body: Body | None = None, hidden: int = 64) -> None:
        super().__init__()
        require_at_least(1, hidden=hidden)
        if isinstance(body, RecurrentBody):
            raise ConfigError("GRUBody(body=...): the body behind a memory has none; use MLPBody")
        self.body = body if body is not None else MLPBody([64])
        self.hidden = self.state_size = hidden

    def build(self, space: Space) -> int:
        self.cell = nn.GRUCell(self.body.build(space), self.hidden)
        return self.hidden

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observations)
        after = self.cell(features.flatten(0, -2), state.flatten(0, -2)).reshape(state.shape)
        return after, after


@configurable
class PerAgent(Body):
    """A body for each agent of a group, in place of one that all share.

    Args:
        body: of which each agent gets a copy with weights of its own.
    """

    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        self.body = body if body is not None else MLPBody()

    def build(self, space: Space) -> int:
        if not space.agents:
            raise ConfigError("PerAgent is for groups of agents, and this environment has one")
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
    """Sees what all agents of a group see, and gives each of them the same features.

    As the body of a critic, it makes IPPO into MAPPO (Yu et al. 2022).

    Args:
        hidden: widths of its layers.
        activation: after each of them.
        observations: names of those to read; None: all.
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
            raise ConfigError("Centralized is for groups of agents, and this environment has one")
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
