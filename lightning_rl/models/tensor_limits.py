"""Policies whose matrices ranks cannot share yet."""

from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.quantized_layers import quantized_layers


def require_splittable(lm: PreTrainedModel, lora: LoRA | None, size: int) -> None:
    """Check that what is made of a model can be split over as many ranks.

    Raises:
        ConfigError: naming the setting that cannot be used with it.
    """
    hindrance = None
    if hasattr(lm.config, "vision_config"):
        hindrance = f"a model that sees pictures ({lm.config.model_type}) is not split yet"
    elif quantized_layers(lm):
        hindrance = "weights that lora.quantization keeps in few bits are not split"
    elif lora is not None and lora.options.get("use_dora"):
        hindrance = "lora.options.use_dora takes norms of whole weights, which no process has"
    elif any(module._compiled_call_impl is not None for module in lm.modules()):
        hindrance = "compile is not proven for split layers"
    if hindrance is not None:
        raise ConfigError(f"tensor={size}: {hindrance}; leave it out, or set tensor: 1")
