"""Layers that bodies and heads are made of."""

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
    """What an agent makes in the end, at least in float32: under autocast, too.

    A bfloat16 has 3 digits, which is too few for logits, noise that is added to them, and values.
    """

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        return made.float() if made.element_size() < 4 else made


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """A layer with orthogonal weights and no bias to begin with (Andrychowicz et al. 2021)."""
    return _begun(nn.Linear(inputs, outputs), gain)


def output(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """The same, as the last layer of a head."""
    return _begun(OutputLayer(inputs, outputs), gain)


def _begun(layer: nn.Linear, gain: float) -> nn.Linear:
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
