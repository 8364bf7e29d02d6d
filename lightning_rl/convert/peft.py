"""peft's LoraConfig, which TRL's trainer takes in addition to its GRPOConfig."""

from collections.abc import Mapping
from typing import Any

from lightning_rl.errors import ConfigError

KEY = "peft_config"
"""Key under which ``LoraConfig.to_dict()`` is kept with the values of a GRPOConfig."""
_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_OURS_ANYWAY = {
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "revision",
    "auto_mapping",
}
_ON: dict[str, Any] = {
    "bias": "none",
    "init_lora_weights": True,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "runtime_config": {"ephemeral_gpu_offload": False},
}
"""The defaults of peft's LoraConfig that are not off."""


def with_adapters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those of ``peft_config`` under the names of TRL's own script.

    Values without such a name are kept as ``peft_config.name``, so that they are reported.

    Raises:
        ConfigError: if it is a method other than LoRA.
    """
    values = dict(values)
    peft = values.pop(KEY, None)
    if peft is None:
        return values
    if not isinstance(peft, Mapping) or str(peft.get("peft_type", "LORA")).upper() != "LORA":
        raise ConfigError(f"{KEY} is not a LoraConfig.to_dict(); only LoRA adapters are supported")
    # Of its own, LoraConfig has alpha 8, r 8 and no dropout.
    found: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
    for name, value in peft.items():
        if name in _NAMES and value is not None:
            found[_NAMES[name]] = value
        elif name not in _OURS_ANYWAY and (value or None) != _ON.get(name):
            found[f"{KEY}.{name}"] = value
    return values | found
