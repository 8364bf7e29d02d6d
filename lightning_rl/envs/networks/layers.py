"""Layers of bodies and heads."""

import math

from torch import Tensor, nn

from lightning_rl.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
}


class OutputLayer(nn.Linear):
    """An agent's output layer, whose result is at least float32, also under autocast.

    A bfloat16 has 3 digits, too few for logits, the noise added to them, and values.
    """

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        return made.float() if made.element_size() < 4 else made


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Create a layer with orthogonal weights and zero bias (Andrychowicz et al. 2021)."""
    return _begun(nn.Linear(inputs, outputs), gain)


def output(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Create the same as the last layer of a head."""
    return _begun(OutputLayer(inputs, outputs), gain)


def _begun(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: list[int], activation: str) -> nn.Sequential:
    """Create linear layers of these widths, each followed by the activation."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


def require_activation(name: str) -> None:
    """Refuse an unknown activation.

    Raises:
        ConfigError: names the known ones.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation={name!r} must be one of {', '.join(ACTIVATIONS)}")
