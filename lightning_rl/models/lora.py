"""LoRA through peft: train small adapters, push them or merged weights, export the latter."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.models.sharding import whole

ADAPTER = "default"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on linear layers; everything else is frozen (Hu et al. 2021).

    Args:
        rank: of the update B A.
        alpha: the update is scaled by alpha / rank.
        target_modules: names of the layers, or ``all-linear``.

    Raises:
        ConfigError: if ``rank`` is below 1, or ``alpha`` not finite.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])

    def __post_init__(self) -> None:
        require_at_least(1, **{"lora.rank": self.rank})
        require_finite(**{"lora.alpha": self.alpha})

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
        adapted = {id(module) for module in _adapted(lm).values()}
        tied = lm.config.get_text_config().tie_word_embeddings
        ends = [lm.get_output_embeddings(), *([lm.get_input_embeddings()] if tied else [])]
        if any(id(end) in adapted for end in ends):
            # The policy head reads the output layer's weight as it is, and chunk by chunk.
            raise ConfigError(
                f"lora.target_modules={self.target_modules} adapts the output layer (or an "
                "embedding tied to it), which packed scoring does not compute; leave it out"
            )


def adapter_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Of each adapted layer ``X.lora_A`` (rank, in) and ``X.lora_B`` (out, rank).

    The weight that acts is ``X.weight + lora_B @ lora_A``: the scale is in B, and layers that keep
    their weight transposed (embeddings, GPT-2's) get factors that fit it.
    """
    state = lm.state_dict()  # not the modules: it brings sharded weights into their sharded state
    for name, module in _adapted(lm).items():
        embeds = ADAPTER in module.lora_embedding_A
        kind, leaf = ("lora_embedding_", "") if embeds else ("lora_", ".weight")
        a, b = (whole(state[f"{name}.{kind}{x}.{ADAPTER}{leaf}"].detach()) for x in "AB")
        b = b * module.scaling[ADAPTER]
        transposed = embeds or module.fan_in_fan_out
        yield f"{name}.lora_A", b.T if transposed else a
        yield f"{name}.lora_B", a.T if transposed else b


def base_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of the model without LoRA, as they were before it."""
    for name, weight in lm.state_dict().items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), weight.detach()


@torch.no_grad()
def merged_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of the model without LoRA, one merged layer at a time."""
    adapted = _adapted(lm)
    for name, weight in base_weights(lm):
        owner, _, leaf = name.rpartition(".")
        if owner in adapted and leaf == "weight":
            weight = weight + adapted[owner].get_delta_weight(ADAPTER).to(weight.dtype)
        yield name, weight.detach()


def _adapted(lm: PreTrainedModel) -> dict[str, Any]:
    """Layers with an adapter, by the names that they had without."""
    modules = lm.named_modules()
    return {name: module for name, module in modules if hasattr(module, "get_delta_weight")}
