"""What is changed of a transformers model before it is trained."""

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.models.attention import ATTENTION, packed_attention
from lightning_rl.models.stacked import FileNames

EXPERTS = "lightning_rl_experts"


def disable_dropout(lm: PreTrainedModel) -> None:
    """Dropout would make the trainer's logprobs differ from the engine's on the same weights.

    So would a router's jitter.
    """
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many layers keep the probability as a number: dropout, attention_dropout, layerdrop, ...
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def compile_each_layer(lm: PreTrainedModel) -> None:
    """Compile each layer of ``lm`` but attention and experts, in place; weights keep their names.

    Shapes are dynamic, so that packs of any size run what the first one compiled. Attention loops
    over batches whose number changes with every pack, and would be recompiled each time. Grouped
    products of experts fall back to a loop where they are compiled, but for bfloat16.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    if FileNames(lm).stacked:
        ExpertsInterface.register(EXPERTS, torch.compiler.disable(grouped_mm_experts_forward))
        lm.set_experts_implementation(EXPERTS)
    for module in lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)
