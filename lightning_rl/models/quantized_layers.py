"""Linear layers whose frozen weights are kept in few bits."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.quantization import Quantization


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is another layer's, quantised and frozen.

    ``weight`` is unpacked at each access, in the dtype to which the layer was last cast, and never
    kept: a backward pass unpacks it again. The layer computes exactly the same bits as a plain one
    with that weight.

    Args:
        linear: has the weight, and the bias, which is not quantised.
        quantization: the format of the weight.
        weight: (out, in), used instead of the linear layer's.
    """

    def __init__(
        self, linear: nn.Linear, quantization: Quantization, weight: Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantization = quantization
        weight = linear.weight if weight is None else weight
        parts = quantization.pack(weight.detach().float())
        self._parts = tuple(parts)
        # Parameters, for DDP sends buffers to all ranks time and again.
        for name, part in parts.items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        self._dtype = torch.float32

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight (out, in); a new tensor at each access."""
        return self.unpacked(self.parts, self._dtype)

    @property
    def parts(self) -> dict[str, nn.Parameter]:
        """The parts of the weight, by name; under FSDP2 sharded except while the layer computes."""
        return {name: getattr(self, name) for name in self._parts}

    def unpacked(self, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (out, in) of these parts; in the layer's dtype by default."""
        shape = torch.Size((self.out_features, self.in_features))
        with torch.no_grad():
            return self.quantization.unpack(parts, shape, dtype or self._dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Whatever casts modules, such as .to(dtype), comes by here.
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self.bias, self)
        return product

    def weight_for(self, x: Tensor) -> Tensor:
        """Return the weight in the dtype of the product with an input, under autocast or not."""
        device = x.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else x.dtype
        return self.unpacked(self.parts, dtype)


class _Product(torch.autograd.Function):
    """``F.linear`` that keeps no weight for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        weight = layer.weight_for(x)
        ctx.layer, ctx.dtype = layer, weight.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ ctx.layer.unpacked(ctx.layer.parts, ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0)
        return of_x, of_bias, None


def quantize(lm: PreTrainedModel, quantization: Quantization) -> None:
    """Quantise all linear layers of the model except its output layer, in place.

    Layers are packed one by one on torch's default device, and stay there, so there is no second
    model in memory.

    Raises:
        ConfigError: if the model has no linear layers.
    """
    found = linear_layers(lm)
    if not found:
        raise ConfigError(
            f"lora.quantization: {type(lm).__name__} has no linear layers (nn.Linear) to quantise; "
            "leave it out"
        )
    for name, module in found.items():
        if not isinstance(module, QuantizedLinear):
            linear = module.to(torch.get_default_device())
            lm.set_submodule(name, QuantizedLinear(linear, quantization))


def linear_layers(lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all linear layers except the output layer, by name."""
    head = lm.get_output_embeddings()
    return {
        name: module
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers, by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, QuantizedLinear)}


def weights_in(module: nn.Module) -> dict[nn.Parameter, int]:
    """Return the number of weights per parameter; a packed layer's count for its first part."""
    result = {parameter: parameter.numel() for parameter in module.parameters()}
    for layer in quantized_layers(module).values():
        first, *others = layer.parts.values()
        result |= {first: layer.in_features * layer.out_features} | dict.fromkeys(others, 0)
    return result


def unpacked_state(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield ``lm.state_dict()`` with unpacked weights instead of parts.

    Sharded parts are gathered, so all ranks have to exhaust this iterator together.
    """
    layers, state = quantized_layers(lm), lm.state_dict()
    for name, tensor in state.items():
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner)
        if layer is None or leaf not in layer._parts:
            yield name, tensor
        elif leaf == layer._parts[0]:  # where the weight would be
            parts = {part: full_tensor(state[f"{owner}.{part}"]) for part in layer._parts}
            yield f"{owner}.weight", layer.unpacked(parts)
