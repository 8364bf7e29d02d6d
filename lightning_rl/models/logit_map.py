"""Maps from an output head's products to logits: scaling, capping, or neither."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class LogitMap:
    """Logits ``cap tanh(scale z / cap)`` of the head's products z; without a cap ``scale z``.

    Gemma 2 caps them (Gemma Team 2024, arXiv 2408.00118, section 2), Granite and Cohere scale them.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        """Turn products into logits (m, V) in place; return the slope, d logits / d products."""
        if self.cap is None:
            products.mul_(self.scale)
            return products.new_full((1, 1), self.scale)
        products.mul_(self.scale / self.cap).tanh_()
        slope = products.square().neg_().add_(1.0).mul_(self.scale)
        products.mul_(self.cap)
        return slope


def logit_map_of(config: PretrainedConfig) -> LogitMap | None:
    """Return the map of a model with this configuration; None: its logits are the products."""
    text = config.get_text_config()
    scale = 1.0
    for name in _FACTORS:
        scale *= getattr(text, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(text, name, None) or 1.0
    cap = next((found for name in _CAPS if (found := getattr(text, name, None))), None)
    return None if scale == 1.0 and cap is None else LogitMap(scale, cap)


# What configurations call them. Who computes something else by one of these names is found out when
# the model is loaded, and refused (exact_passes).
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Cohere's; Falcon-H1's; Muse's."""
_DIVISORS = ("logits_scaling",)
"""Granite's."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma's; RecurrentGemma's; xLSTM's."""
