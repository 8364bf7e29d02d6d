"""Which of peft's LoRA options can be trained here: what engines get are merged weights."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from lightning_rl.errors import ConfigError

MERGED = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_dropout",
)
_KEEP_BASE = (True, False, "gaussian", "orthogonal")
"""Ways to initialise adapters that leave the model's own weights as they are."""
_OUR_NAMES = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
_NO_SETTINGS = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}
"""What peft keeps in a configuration that changes nothing in training."""


def require_mergeable(options: Mapping[str, Any]) -> None:
    """Check options for ``peft.LoraConfig``.

    Raises:
        ConfigError: naming the first that cannot be used, and why.
    """
    for name, value in options.items():
        place = f"lora.options.{name}={value!r}"
        if name in _OUR_NAMES:
            raise ConfigError(f"{place}: set lora.{_OUR_NAMES[name]} instead")
        if name not in MERGED:
            raise ConfigError(
                f"{place} cannot be merged into the weights that engines get, or is no option of "
                f"peft.LoraConfig; there are {', '.join(MERGED)}"
            )
    if options.get("lora_dropout"):
        raise ConfigError(
            f"lora.options.lora_dropout={options['lora_dropout']}: the trainer's logprobs would "
            "differ at random from the engine's on the same weights; leave it out"
        )
    if (start := options.get("init_lora_weights", True)) not in _KEEP_BASE:
        raise ConfigError(
            f"lora.options.init_lora_weights={start!r} changes the model's own weights; choose "
            "true, false, gaussian or orthogonal"
        )


def options_of(config: Any) -> dict[str, Any]:
    """What a ``peft.LoraConfig`` sets beside rank, alpha and layers."""
    options = {}
    for f in fields(config):
        if f.name in _OUR_NAMES or f.name in _NO_SETTINGS:
            continue
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if (value := getattr(config, f.name)) != default:
            options[f.name] = value
    return options
