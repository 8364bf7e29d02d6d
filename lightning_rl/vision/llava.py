"""LLaVA: pictures of one size, seen by a CLIP or SigLIP tower; positions as for text."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_rl.vision.families import Family, Features, Prepared, tensor_of

TOWERS = ("clip_vision_model", "siglip_vision_model")


class Llava(Family):
    """LLaVA models: every picture becomes a square of fixed size, with one token per patch."""

    architecture = "LlavaForConditionalGeneration"

    @classmethod
    def reads(cls, config: PretrainedConfig) -> bool:
        return config.model_type == "llava" and config.vision_config.model_type in TOWERS

    def prepare(self, image: Image) -> Prepared:
        pixels = tensor_of(self.processor(images=[image], return_tensors="pt"), "pixel_values")
        side = self.config.vision_config.patch_size
        height, width = (length // side for length in pixels.shape[-2:])
        # CLIP's tower has a state more, of the whole picture, which "default" leaves out.
        whole = self.config.vision_config.model_type == "clip_vision_model"
        left_out = self.config.vision_feature_select_strategy == "default"
        count = height * width + whole - left_out
        return Prepared(pixels, (1, height, width), torch.arange(count)[None], count)

    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        pixels = torch.cat([one.pixels for one in pictures])
        found = lm.base_model.get_image_features(
            pixels.to(lm.device, lm.dtype, non_blocking=True), return_dict=True
        )
        return Features(torch.cat(list(found.pooler_output)))

    @classmethod
    def tower(cls, lm: PreTrainedModel) -> Any:
        return lm.base_model.vision_tower

    @classmethod
    def projector(cls, lm: PreTrainedModel) -> list[nn.Module]:
        return [lm.base_model.multi_modal_projector]

    @classmethod
    def unused(cls, lm: PreTrainedModel) -> list[nn.Module]:
        """Return the layers after the one whose states are used, and the pooling of the last."""
        tower, layers = cls.tower(lm), cls.tower(lm).encoder.layers
        taken = lm.config.vision_feature_layer
        last = max(
            layer if layer >= 0 else len(layers) + 1 + layer
            for layer in ([taken] if isinstance(taken, int) else taken)
        )
        pooling = [getattr(tower, name, None) for name in ("post_layernorm", "head")]
        behind = [part for part in pooling if isinstance(part, nn.Module)]
        return [*layers[last:], *(behind if last < len(layers) else [])]

    def own_inputs(self, pictures: Sequence[Prepared], token_ids: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([one.pixels for one in pictures])}
