"""Which of a model's parameters ranks share, and along which dimension: transformers' own plan."""

import re
from math import gcd

from torch import nn
from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError


def require_divisible(model: PreTrainedModel, size: int) -> None:
    """Check that ranks can share a model's heads and vocabulary.

    Raises:
        ConfigError: naming the dimension that the number of ranks does not divide.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "tokens of the vocabulary": model.get_input_embeddings().weight.shape[0],
    }
    for what, count in counts.items():
        if count % size:
            raise ConfigError(
                f"tensor={size} does not divide the model's {count} {what}; set tensor to a "
                f"divisor of {gcd(*counts.values())}"
            )


_ANYWAY = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Done whether a plan says so or not: to all else within a split part, and to embeddings."""


def styles_of(body: PreTrainedModel) -> dict[str, str]:
    """How transformers' plan splits the body's modules, by name: colwise or rowwise.

    Raises:
        ConfigError: if there is no plan, or one that splits anything but dense layers.
    """
    kind = type(body).__name__
    plan = getattr(body.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{kind}: transformers has no tensor-parallel plan of it (base_model_tp_plan); set "
            "tensor: 1"
        )
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style in _ANYWAY:
            continue
        if style not in ("colwise", "rowwise"):
            raise ConfigError(
                f"{kind}: transformers splits {pattern!r} as {style!r}, and only dense layers are "
                "split here (colwise, rowwise); set tensor: 1"
            )
        names = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        styles |= {name: style for name, _ in body.named_modules() if names.fullmatch(name)}
    return styles


def dims_of(body: PreTrainedModel, styles: dict[str, str], size: int) -> dict[nn.Parameter, int]:
    """Along which dimension each parameter that is split is, those of adapters too.

    A column-wise layer's outputs are split, so of its adapter's factors B alone; a row-wise one's
    inputs, so A alone.

    Raises:
        ConfigError: naming a layer that so many ranks cannot share.
    """
    dims: dict[nn.Parameter, int] = {}
    for name, style in styles.items():
        dim, whole = (0, "lora_A.") if style == "colwise" else (1, "lora_B.")
        for part, linear in body.get_submodule(name).named_modules():
            if not isinstance(linear, nn.Linear) or part.startswith(whole):
                continue
            if style == "rowwise" and linear.bias is not None:
                raise ConfigError(
                    f"tensor={size}: {name} has a bias, which each process would add; set tensor: 1"
                )
            if linear.weight.shape[dim] % size:
                raise ConfigError(
                    f"tensor={size} does not divide the {linear.weight.shape[dim]} "
                    f"{('outputs', 'inputs')[dim]} of {name}; set tensor to a divisor"
                )
            dims |= dict.fromkeys(linear.parameters(recurse=False), dim)
    return dims
