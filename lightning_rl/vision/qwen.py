"""Qwen2.5-VL and Qwen3-VL: pictures of any size, positions with three axes (M-RoPE)."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_rl.vision.families import Family, Features, Prepared, rows_of, tensor_of


class Qwen25VL(Family):
    """Qwen2.5-VL: four patches are one token; the tower processes all pictures in one pass."""

    architecture = "Qwen2_5_VLForConditionalGeneration"
    axes = 3

    @classmethod
    def reads(cls, config: PretrainedConfig) -> bool:
        return config.model_type == "qwen2_5_vl"

    def prepare(self, image: Image) -> Prepared:
        made = self.processor(images=[image], return_tensors="pt")
        frames, height, width = (int(n) for n in made["image_grid_thw"][0])
        side = self.config.vision_config.spatial_merge_size
        rows, columns = height // side, width // side
        # A still picture is one moment: its rows and columns count from its first position on.
        axes = torch.meshgrid(
            torch.zeros(frames, dtype=torch.long),
            torch.arange(rows),
            torch.arange(columns),
            indexing="ij",
        )
        return Prepared(
            pixels=tensor_of(made, "pixel_values"),
            grid=(frames, height, width),
            positions=torch.stack([axis.flatten() for axis in axes]),
            advance=max(rows, columns),
        )

    def features(self, lm: PreTrainedModel, pictures: Sequence[Prepared]) -> Features:
        device = lm.device
        found = lm.base_model.get_image_features(
            torch.cat([one.pixels for one in pictures]).to(device, non_blocking=True),
            torch.tensor([one.grid for one in pictures], device=device),
            return_dict=True,
        )
        deeper = tuple(
            # Of each picture apart, or before transformers 5.19 of all in one.
            layer if isinstance(layer, Tensor) else torch.cat(list(layer))
            for layer in getattr(found, "deepstack_features", None) or ()  # Qwen3-VL's alone
        )
        return Features(torch.cat(list(found.pooler_output)), deeper)

    @classmethod
    def tower(cls, lm: PreTrainedModel) -> nn.Module:
        tower: nn.Module = lm.base_model.visual
        return tower

    @classmethod
    def projector(cls, lm: PreTrainedModel) -> list[nn.Module]:
        return [lm.base_model.visual.merger]

    def own_inputs(self, pictures: Sequence[Prepared], token_ids: Tensor) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.cat([one.pixels for one in pictures]),
            "image_grid_thw": torch.tensor([one.grid for one in pictures]),
            "mm_token_type_ids": (token_ids == self.placeholder).int(),
        }


class Qwen3VL(Qwen25VL):
    """Qwen3-VL: states of several tower layers are added in the language model's first layers."""

    architecture = "Qwen3VLForConditionalGeneration"

    @classmethod
    def reads(cls, config: PretrainedConfig) -> bool:
        return config.model_type == "qwen3_vl"

    @classmethod
    def projector(cls, lm: PreTrainedModel) -> list[nn.Module]:
        return [lm.base_model.visual.merger, lm.base_model.visual.deepstack_merger_list]

    def inputs(
        self, embedded: Tensor, at: tuple[Tensor, Tensor], index: Tensor, features: Features
    ) -> dict[str, Any]:
        mask = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        mask[at] = True
        return super().inputs(embedded, at, index, features) | {
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": [rows_of(layer, index) for layer in features.deeper],
        }
