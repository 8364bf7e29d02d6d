"""Requirements of a LoRA that an engine keeps unmerged, known before the model is read."""

import torch
from torch import nn

from lightning_rl.models.lora import LoRA, adapted_layers
from lightning_rl.models.pretrained import Loading, load_lm
from lightning_rl.vision.reader import family_of
from lightning_rl.vision.training import Vision, in_tower


def largest_rank(lora: LoRA) -> int:
    """Return the largest rank of any layer, including peft's ``rank_pattern``."""
    return max(lora.rank, *lora.options.get("rank_pattern", {}).values(), 1)


def merged_only(
    lora: LoRA, model: str, loading: Loading, vision: Vision | None = None
) -> str | None:
    """Tell why an engine can only merge a model's LoRA; None if it may keep it unmerged.

    Args:
        lora: the LoRA to be trained.
        model: directory or hub name of its base.
        loading: how the base is read; here, without its weights.
        vision: which parts of its vision tower are trained, if it has one.
    """
    if lora.options.get("use_dora"):
        return "use_dora scales the merged weights, so DoRA is no sum of base and adapter"
    if lora.trains_base:
        return "lora.options train weights of the model too (modules_to_save or bias)"
    with torch.device("meta"):
        lm = load_lm(model, loading)
        family = family_of(lm.config)
        seeing = set() if family is None else in_tower(family, lm)
        lora.attach(lm, None if family is None else (vision or Vision()).adapted(family, lm))
    for name, layer in adapted_layers(lm).items():
        if name in seeing:
            return f"lora adapts {name!r} of the tower, which sees for all requests at once"
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear):
            return f"lora adapts {name!r}, a {type(base).__name__}, and engines linear layers only"
    return None
