"""How a pretrained model is read: from files, or as given; with its weights, or as a skeleton."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from lightning_rl.errors import ConfigError

REFUSED = {
    "attn_implementation": "packed rollouts are computed by an attention of the library's own, "
    "which takes a fused kernel where there is one",
    "dtype": "master weights stay in float32; trainer.precision decides what computes",
    "torch_dtype": "master weights stay in float32; trainer.precision decides what computes",
    "device_map": "the Trainer's strategy decides where weights are",
    "quantization_config": "quantised weights can neither be trained nor pushed to an engine",
    "load_in_4bit": "quantised weights can neither be trained nor pushed to an engine",
    "load_in_8bit": "quantised weights can neither be trained nor pushed to an engine",
    "trust_remote_code": "it is a key of its own, beside model_kwargs",
    "config": "name the settings of the configuration themselves, such as rope_theta",
    "state_dict": "weights come from the model's files",
}


_OF_FILES = ("revision", "code_revision", "subfolder", "cache_dir", "token", "local_files_only")
"""Where files are, which tokenizers and processors want to know too."""


@dataclass(frozen=True)
class Loading:
    """Arguments of all ``from_pretrained`` that a model takes.

    Args:
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``AutoModelForCausalLM.from_pretrained``: ``revision``
            and others of files, which the tokenizer gets too, or settings of the configuration.

    Raises:
        ConfigError: for an argument that the library decides itself.
    """

    trust_remote_code: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.model_kwargs:
            if name in REFUSED:
                raise ConfigError(f"model_kwargs.{name} cannot be set: {REFUSED[name]}")

    @property
    def of_model(self) -> dict[str, Any]:
        """For models and their configurations."""
        return {"trust_remote_code": self.trust_remote_code, **self.model_kwargs}

    @property
    def of_files(self) -> dict[str, Any]:
        """For tokenizers and processors."""
        given = {name: v for name, v in self.model_kwargs.items() if name in _OF_FILES}
        return {"trust_remote_code": self.trust_remote_code, **given}

    def copy_code(self, model: str, directory: str | Path) -> None:
        """What else a model's directory needs that others are to load: the code it came with."""
        if self.trust_remote_code and Path(model).is_dir():
            for file in Path(model).glob("*.py"):
                shutil.copy(file, directory)


PLAIN = Loading()


def has_code_of_its_own(error: Exception) -> bool:
    """Whether this is transformers' refusal to run code that comes with a model."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def read_tokenizer(model: str, loading: Loading) -> PreTrainedTokenizerBase:
    """The tokenizer, of a processor if it must be; a processor's chat template if it has none.

    Raises:
        OSError: if there is none.
        ValueError: the same, or if it needs code that is not trusted.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **loading.of_files)
    except (OSError, ValueError) as error:
        processor = None if has_code_of_its_own(error) else _read_processor(model, loading)
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise
    if tokenizer.chat_template is None:
        processor = _read_processor(model, loading)
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return tokenizer


def _read_processor(model: str, loading: Loading) -> Any:
    """What reads more than text, of which we take the text's part; None without."""
    hub = {name: value for name, value in loading.of_files.items() if name != "trust_remote_code"}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub) is None:
            continue
        try:
            return AutoProcessor.from_pretrained(model, **loading.of_files)
        except ImportError as error:  # of images, sound or video, none of which is read here
            raise ConfigError(
                f"model={model!r} has its tokenizer or chat template in a processor, which cannot "
                f"be loaded: {str(error).strip().splitlines()[0]}; save both with the tokenizer"
            ) from error
    return None


_OURS = ("conversation", "tokenize", "add_generation_prompt", "tools", "return_dict")


def with_chat_variables(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Let a tokenizer give its chat template these variables whenever it renders a chat.

    Raises:
        ConfigError: if there is no chat template, or it never reads one of them.
    """
    for name in chat_template_kwargs:
        if name in _OURS:
            raise ConfigError(f"chat_template_kwargs.{name} is set by the library; leave it out")
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"chat_template_kwargs.{name}: the tokenizer has no chat template to read it"
            )
        if name != "chat_template" and name not in str(tokenizer.chat_template):
            raise ConfigError(
                f"chat_template_kwargs.{name}: the tokenizer's chat template never reads it; is it "
                "spelled as there?"
            )
    if chat_template_kwargs:  # what a caller gives goes first
        rendered = partial(tokenizer.apply_chat_template, **chat_template_kwargs)
        tokenizer.apply_chat_template = rendered
    return tokenizer


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


def without_weights() -> bool:
    """Whether what is built now is to have shapes only (``with torch.device("meta"):``)."""
    return torch.get_default_device().type == "meta"


def skeleton(
    config: PretrainedConfig,
    loading: Loading,
    attention: str,
    kind: type[AutoModel] | type[AutoModelForCausalLM] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The parameters that ``from_pretrained`` would give, in float32, on the meta device."""
    made: PreTrainedModel = kind.from_config(
        config, attn_implementation=attention, trust_remote_code=loading.trust_remote_code
    )
    return made.float()
