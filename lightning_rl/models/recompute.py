"""Recomputation in the backward pass (gradient checkpointing), to save memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.models.input_offloading import HostInputs


@configurable
@dataclass(frozen=True)
class Recompute:
    """Layers keep only their inputs, and recompute everything else in the backward pass.

    Gradients do not change, except for rounding with ``mlp_tokens``.

    Args:
        every: recompute one of every ``every`` layers; the others keep their activations.
        keep: what recomputed layers keep besides their inputs: ``attention`` for the outputs of
            fused attention kernels, which dominate the recomputation of long rollouts. Each takes
            as much memory as the attention's queries.
        inputs: where layers' inputs are stored: on the ``device``, or in ``host`` memory, pinned
            on CUDA. Copies overlap with computation.
        mlp_tokens: compute a layer's MLP for so many tokens at a time, so that backward holds
            activations only of these; the MLP is computed once more. None: for all tokens at once.

    Raises:
        ConfigError: if ``every`` or ``mlp_tokens`` is below 1.
    """

    every: int = 1
    keep: Literal["nothing", "attention"] = "nothing"
    inputs: Literal["device", "host"] = "device"
    mlp_tokens: int | None = None

    def __post_init__(self) -> None:
        require_at_least(
            1,
            **{
                "gradient_checkpointing.every": self.every,
                "gradient_checkpointing.mlp_tokens": self.mlp_tokens,
            },
        )

    def apply(self, lm: PreTrainedModel) -> None:
        """Set up recomputation in a model's layers, in place; it acts in training mode.

        Raises:
            ConfigError: if the layers do not support these settings.
        """
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        layers = layers_of(lm)
        if not layers and self != Recompute():
            raise ConfigError(
                f"gradient_checkpointing: {type(lm).__name__} has custom layers, which can only be "
                "recomputed as a whole; set it to true"
            )
        again = self._checkpoint()
        for left, layer in zip(range(len(layers), 0, -1), layers, strict=True):
            layer._gradient_checkpointing_func = again
            # The last layer only if all are: it is the first to give back what it keeps, and then
            # there is room for another one's.
            layer.gradient_checkpointing = left % self.every == 0
        if self.mlp_tokens is not None:
            tile_mlps(lm, self.mlp_tokens)

    def _checkpoint(self) -> Callable[..., Any]:
        options: dict[str, Any] = {"use_reentrant": False}
        if self.keep == "attention":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps_attention)
        plain = partial(checkpoint, **options)
        return HostInputs(plain) if self.inputs == "host" else plain


def as_recompute(given: bool | Recompute) -> Recompute | None:
    """Convert True to ``Recompute()`` and False to None."""
    return (Recompute() if given else None) if isinstance(given, bool) else given


def layers_of(module: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return all layers that can be recomputed."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


FUSED_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
"""Attention kernels whose outputs are small: they do not return scores."""


def keeps_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep outputs of fused attention, as a policy of ``create_selective_checkpoint_contexts``."""
    kept = operation.name() in FUSED_ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------- MLPs


class TiledMLP:
    """An MLP's forward pass in tiles of some tokens, each of which is recomputed in backward.

    Tokens do not see each other there, so the outputs are the same; a weight's gradient is summed
    in parts. The tiles of sequences are DeepSpeed's (Bekman et al. 2025, arXiv 2506.13996).

    Args:
        forward: the MLP's forward of states (..., S, D).
        tokens: number of tokens in a tile.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], tokens: int) -> None:
        self.forward, self.tokens = forward, tokens

    def __call__(self, states: Tensor) -> Tensor:
        if states.shape[-2] <= self.tokens:
            return self.forward(states)
        # Nothing is drawn at random in a layer, dropout being off.
        parts = [
            checkpoint(self.forward, part, use_reentrant=False, preserve_rng_state=False)
            for part in states.split(self.tokens, -2)
        ]
        return torch.cat(parts, -2)


def tile_mlps(lm: PreTrainedModel, tokens: int) -> None:
    """Make a model's dense MLPs compute ``tokens`` tokens at a time, in place.

    Raises:
        ConfigError: if the model has no dense MLP.
    """
    mlps = [mlp for layer in layers_of(lm) if (mlp := _dense_mlp(layer)) is not None]
    if not mlps:
        raise ConfigError(
            f"gradient_checkpointing.mlp_tokens={tokens}: no layer of {type(lm).__name__} has a "
            "dense MLP to compute in tiles; leave it out"
        )
    for mlp in mlps:
        mlp.forward = TiledMLP(mlp.forward, tokens)


def tiled_mlps(module: nn.Module) -> list[nn.Module]:
    """Return the MLPs that compute in tiles."""
    return [m for m in module.modules() if isinstance(m.forward, TiledMLP)]


def _dense_mlp(layer: nn.Module) -> nn.Module | None:
    """Return a layer's MLP, if it has one whose weights all belong to linear layers."""
    mlp = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
    if not isinstance(mlp, nn.Module):
        return None
    linear = {
        id(p) for part in mlp.modules() if isinstance(part, nn.Linear) for p in part.parameters()
    }
    routed = any("expert" in name or name in ("gate", "router") for name, _ in mlp.named_modules())
    return mlp if not routed and all(id(p) in linear for p in mlp.parameters()) else None
