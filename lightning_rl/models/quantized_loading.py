"""Packs each weight while a model's files are read, so the unpacked model is never in memory."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lightning_rl.models.model_checks import is_usable
from lightning_rl.models.quantization import Quantization
from lightning_rl.models.quantized_layers import QuantizedLinear, linear_layers

_NAME = "lightning_rl"


@register_quantization_config(_NAME)
class PackedReading(QuantizationConfigMixin):
    """``quantization_config`` for a ``from_pretrained`` that packs linear layers.

    A weight that has a wrong shape, or is not finite, is not packed, so that it is refused as in a
    model that is not packed.

    Args:
        quantization: the form of the weights.
        device: where they are packed and kept.
    """

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        self.quant_method = _NAME  # transformers has an enum
        self.quantization, self.device = quantization, device
        # Names and shapes, in the files and of the model; with a quantizer transformers tells none.
        self.mismatched: set[tuple[str, torch.Size, torch.Size]] = set()

    def __deepcopy__(self, memo: Any) -> "PackedReading":
        return self  # transformers copies its arguments, and what it finds is to be seen


@register_quantizer(_NAME)
class _Quantizer(HfQuantizer):
    """The hooks that ``from_pretrained`` calls, in the order of the methods."""

    quantization_config: PackedReading

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self.linear = linear_layers(model)
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        owner, _dot, leaf = param_name.rpartition(".")
        return leaf == "weight" and owner in self.linear

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self.quantization_config.mismatched |= {
            (name, p.shape, self.shapes[name])
            for name, p in model.named_parameters()
            if self.shapes.get(name, p.shape) != p.shape
        }
        self.remove_quantization_config(model)  # configurations that are written have none

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


class _Pack(ConversionOps):
    """Takes the weights of linear layers while they are read, and puts packed layers in place."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self.form, self.linear = quantizer.quantization_config, quantizer.linear

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: nn.Module,
        missing_keys: set[str] | None = None,
        **__: Any,
    ) -> dict[str, Any]:
        left = {}
        for name, value in input_dict.items():
            weight: Tensor = value[0] if isinstance(value, list) else value
            layer = name.removesuffix(".weight")
            linear = self.linear.get(layer)
            if linear is None or weight.shape != linear.weight.shape or not is_usable(weight):
                left[name] = value
                continue
            weight = weight.to(self.form.device)
            packed = QuantizedLinear(linear, self.form.quantization, weight)
            packed._is_hf_initialized = True  # type: ignore[assignment]
            model.set_submodule(layer, packed)
            if missing_keys is not None:
                missing_keys.discard(name)
        return left
