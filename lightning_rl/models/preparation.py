"""Changes to a transformers model before training."""

from functools import cache
from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.models.recompute import Recompute
from lightning_rl.models.stacked import FileNames
from lightning_rl.run.processes.dist import fell_back

EXPERTS = "lightning_rl_experts"


def disable_dropout(lm: PreTrainedModel) -> None:
    """Disable dropout, which would make the trainer's logprobs differ from the engine's.

    Also disable noise and random choices of experts in routers (PhiMoE's).
    """
    for module in list(lm.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
        # Many layers keep the probability as a number: dropout, attention_dropout, layerdrop, ...
        for name in numbers:
            if "drop" in name:
                setattr(module, name, 0.0)
        if any("jitter" in name for name in numbers):
            _stay_in_evaluation(module)


def _stay_in_evaluation(module: nn.Module) -> None:
    """Keep a module in evaluation mode, whatever mode its model is in.

    The noise parameter does not change: PhiMoE's router uses it in evaluation, too.
    """
    module.eval()
    module.train = MethodType(_unchanged, module)  # type: ignore[method-assign]


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def compiles_by_default(lm: PreTrainedModel, recompute: Recompute | None, packed: bool) -> bool:
    """Tell whether ``torch.compile`` is used by default.

    On CUDA, where elementwise work would take most of an update: for layers of text alone without
    experts, which have their weights in 16 bits or more (not ``packed``), on one process or DDP,
    recomputed whole or not at all. Not with ``trainer.deterministic``: what the compiler
    chooses depends on the sizes that it meets first, which a run that is resumed meets otherwise.
    """
    return (
        lm.device.type == "cuda"
        and not packed
        and not torch.are_deterministic_algorithms_enabled()
        and (recompute is None or recompute == Recompute(every=recompute.every))
        and not FileNames(lm).stacked
        and not hasattr(lm.config, "vision_config")
        and _compiler_works(lm.device)
    )


@cache
def _compiler_works(device: torch.device) -> bool:
    """Try ``torch.compile``: it needs Triton, which needs a C compiler and Python's headers."""
    try:
        torch.compile(torch.sin)(torch.zeros(8, device=device))
    except (ImportError, RuntimeError, OSError) as error:
        message = str(error).strip() or "no more is said"
        reason = f"{type(error).__name__}: {message.splitlines()[0]}"
        fell_back("torch.compile", reason, "each layer as it is")
        return False
    return True


def compile_each_layer(lm: PreTrainedModel) -> None:
    """Compile each layer of ``lm`` but experts, in place; weights keep their names.

    Shapes are dynamic, so that micro-batches of any size run what the first one compiled. Grouped
    products of experts fall back to a loop where they are compiled, but for bfloat16.
    """
    if FileNames(lm).stacked:
        ExpertsInterface.register(EXPERTS, torch.compiler.disable(grouped_mm_experts_forward))
        lm.set_experts_implementation(EXPERTS)
    for module in lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)
