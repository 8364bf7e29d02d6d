"""A transformers model that is given as an object, where a directory or hub name may stand."""

from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightning_rl.errors import ConfigError


class GivenModel(str):
    """The directory of a copy, which is removed with the last object that refers to it."""

    directory: TemporaryDirectory[str]

    def __deepcopy__(self, memo: Any) -> "GivenModel":
        return self


def model_of(value: Any) -> Any:
    """A directory for a model object, or a pair of model and tokenizer; a name as it is.

    Trainer, engine, reference and export each load what they need from there. The object itself is
    not trained. Without a tokenizer the one of the model's ``name_or_path`` is taken.

    Raises:
        ConfigError: if a copy would not be the same model, or there is no tokenizer.
    """
    pair = isinstance(value, tuple | list) and len(value) == 2
    lm, tokenizer = value if pair else (value, None)
    if not isinstance(lm, nn.Module):
        return value
    _require_plain(lm)
    copy = TemporaryDirectory(prefix="lightning_rl_model_")
    cast(PreTrainedModel, lm).save_pretrained(copy.name)
    (_tokenizer_of(lm) if tokenizer is None else tokenizer).save_pretrained(copy.name)
    given = GivenModel(copy.name)
    given.directory = copy
    return given


def _require_plain(lm: nn.Module) -> None:
    """Refuse what ``from_pretrained`` would not give back."""
    kind = type(lm).__name__
    if not isinstance(lm, PreTrainedModel):
        raise ConfigError(
            f"model: expected a directory, a hub name or a transformers PreTrainedModel, got "
            f"{kind}; of a peft model give merge_and_unload(), or train adapters by lora=LoRA()"
        )
    if getattr(lm, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model: this {kind} carries an adapter; give the model without, and lora=LoRA() to "
            "train one"
        )
    usual = AutoModelForCausalLM._model_mapping.get(type(lm.config), None)
    if type(lm) is not usual:
        raise ConfigError(
            f"model: {kind} is not what AutoModelForCausalLM makes of a {type(lm.config).__name__}"
            + (f" ({usual.__name__})" if usual else "")
            + "; register it there, or give another model"
        )


def _tokenizer_of(lm: PreTrainedModel) -> Any:
    name = lm.config.name_or_path
    try:
        if not name:
            raise ValueError("it was made from a configuration")
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: there is no tokenizer for this {type(lm).__name__} (name_or_path={name!r}: "
            f"{str(error).strip().splitlines()[0]}); give both: model=(model, tokenizer)"
        ) from error
