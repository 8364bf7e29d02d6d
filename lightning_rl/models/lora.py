"""LoRA through peft: train small adapters, push and export merged weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError, require_at_least

ADAPTER = "default"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on linear layers; everything else is frozen (Hu et al. 2021).

    Args:
        rank: of the update B A.
        alpha: the update is scaled by alpha / rank.
        target_modules: names of the layers, or ``all-linear``.

    Raises:
        ConfigError: if ``rank`` is below 1.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])

    def __post_init__(self) -> None:
        require_at_least(1, **{"lora.rank": self.rank})

    def attach(self, lm: PreTrainedModel) -> None:
        """Add the adapters to ``lm``, in place; B starts at zero, so nothing changes yet.

        Raises:
            ConfigError: if peft is missing, or no layer has one of the names.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ConfigError("lora needs peft: `pip install lightning_rl[lora]`") from error
        everything = self.target_modules == ["all-linear"]
        names = "all-linear" if everything else self.target_modules
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=names, task_type="CAUSAL_LM"
        )
        try:
            lm.add_adapter(config, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules={self.target_modules}: {error}") from error
        adapted = {id(m) for m in lm.modules() if hasattr(m, "get_delta_weight")}
        tied = lm.config.get_text_config().tie_word_embeddings
        ends = [lm.get_output_embeddings(), *([lm.get_input_embeddings()] if tied else [])]
        if any(id(end) in adapted for end in ends):
            # The policy head reads the output layer's weight as it is, and chunk by chunk.
            raise ConfigError(
                f"lora.target_modules={self.target_modules} adapts the output layer (or an "
                "embedding tied to it), which packed scoring does not compute; leave it out"
            )


def adapter_config(lm: PreTrainedModel) -> dict[str, Any]:
    """What peft writes to ``adapter_config.json``; plain values only."""
    config = lm.peft_config[ADAPTER].to_dict()
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }


def adapter_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The adapters' A and B, under the names in peft's ``adapter_model.safetensors``."""
    for name, weight in lm.state_dict().items():
        if ".lora_" in name:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", weight.detach()


@torch.no_grad()
def merged_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of the model without LoRA, one merged layer at a time."""
    adapted = {
        name: module for name, module in lm.named_modules() if hasattr(module, "get_delta_weight")
    }
    for name, weight in lm.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in adapted:
            if leaf == "weight":
                weight = weight + adapted[owner].get_delta_weight(ADAPTER).to(weight.dtype)
            name = f"{owner}.{leaf}"
        yield name, weight.detach()
