"""What a LoRA needs of an engine that keeps it beside its base, known before the model is read."""

import torch
from torch import nn

from lightning_rl.models.lora import LoRA, adapted_layers
from lightning_rl.models.pretrained import Loading, load_lm


def largest_rank(lora: LoRA) -> int:
    """That of the layer with the largest, by peft's ``rank_pattern`` too."""
    return max(lora.rank, *lora.options.get("rank_pattern", {}).values(), 1)


def merged_only(lora: LoRA, model: str, loading: Loading) -> str | None:
    """Why an engine can only merge a LoRA of a model; None: it may keep it apart.

    Args:
        lora: as it is trained.
        model: directory or hub name of its base.
        loading: how that is read; here, without its weights.
    """
    if lora.options.get("use_dora"):
        return "use_dora scales the merged weights, so DoRA is no sum of base and adapter"
    if lora.trains_base:
        return "lora.options train weights of the model too (modules_to_save or bias)"
    with torch.device("meta"):
        lm = load_lm(model, True, loading)
        lora.attach(lm)
    for name, layer in adapted_layers(lm).items():
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear):
            return f"lora adapts {name!r}, a {type(base).__name__}, and engines linear layers only"
    return None
