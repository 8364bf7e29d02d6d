"""torch.compile for what of a model stays the same from pack to pack."""

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.models.attention import ATTENTION, packed_attention


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile each layer of ``lm`` but its attention, in place; weights keep their names.

    Shapes are dynamic, so that packs of any size run what the first one compiled. Attention loops
    over buckets whose number changes with every pack, and would be compiled anew each time.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for module in lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)
