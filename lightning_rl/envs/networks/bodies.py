"""Bodies compute features of observations; a custom one is a class with two methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.layers import ACTIVATIONS, linear, mlp, require_activation
from lightning_rl.envs.networks.space import Observed, Space
from lightning_rl.errors import ConfigError, require_at_least


class Body(nn.Module, ABC):
    """Computes features of observations, for the heads of an agent.

    It is created without sizes, so that a configuration can hold it; ``build`` creates its layers
    once the environment is known.
    """

    @abstractmethod
    def build(self, space: Space) -> int:
        """Create the layers; return the number of features F.

        Raises:
            ConfigError: if it cannot read the environment's observations.
        """

    @abstractmethod
    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return features (*B, F) of observations (*B, *shape) by name.

        B stands for environments, time, or sampled steps, and the agents of the group if it has an
        agent dimension.
        """


@configurable
class MLPBody(Body):
    """Linear layers over all observations, flattened and concatenated.

    Args:
        hidden: widths of the layers; empty: the observations themselves are the features.
        activation: activation after each layer.
        observations: names of the observations to read; None: all.

    Raises:
        ConfigError: for a width below 1, or an unknown activation.
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
    """Concatenate the named observations, (*B, total size), as floats."""
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
        channels: output channels of each convolution.
        kernels: their kernel sizes.
        strides: their strides.
        hidden: width of the linear layer after them.
        activation: activation after each layer.
        observation: name of the picture; None: the only one with three dimensions. Bytes are
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
        found = space.observed(None if self.observation is None else [self.observation], "CNNBody")
        pictures = {name: o.shape for name, o in found.items() if len(o.shape) == 3}
        if len(pictures) != 1:
            shapes = ", ".join(f"{name} {o.shape}" for name, o in found.items())
            raise ConfigError(
                f"CNNBody reads one observation with three dimensions, but there are "
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
