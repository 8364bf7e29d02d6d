"""Loads pretrained models from files or objects, with their weights or as skeletons."""

import logging
import re
import shutil
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.packed import ATTENTION
from lightning_rl.models.generation_config import repaired
from lightning_rl.models.model_checks import require_complete, require_finite
from lightning_rl.models.quantization import Quantization
from lightning_rl.models.quantized_layers import quantize
from lightning_rl.models.quantized_loading import PackedReading
from lightning_rl.models.recompute import Recompute
from lightning_rl.run.interpreter import require_docstrings
from lightning_rl.vision.reader import attention, family_of, supported

# transformers imports bitsandbytes with a model, which on CPUs with bfloat16 warns of a kernel that
# it does without.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)

_QUANTIZED = "to keep the frozen base of a LoRA in few bits, set lora.quantization: NF4 (or Int8)"
REFUSED = {
    "attn_implementation": "packed rollouts are computed by an attention of the library's own, "
    "which takes a fused kernel where there is one",
    "_attn_implementation": "packed rollouts are computed by an attention of the library's own",
    "dtype": "master weights stay in float32; trainer.precision decides what computes",
    "torch_dtype": "master weights stay in float32; trainer.precision decides what computes",
    "device_map": "the Trainer's strategy decides where weights are",
    "quantization_config": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "trust_remote_code": "it is a key of its own, beside model_kwargs",
    "config": "name the settings of the configuration themselves, such as rope_theta",
    "state_dict": "weights come from the model's files",
}


OF_FILES = ("revision", "code_revision", "subfolder", "cache_dir", "token", "local_files_only")
"""Arguments that locate files, which tokenizers and processors need too."""


@configurable
@dataclass(frozen=True)
class Loading:
    """How a model is loaded, and how its layers are then set up.

    Args:
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``AutoModelForCausalLM.from_pretrained``: ``revision``
            and others of files, which the tokenizer gets too, or settings of the configuration.
        random_init: start from random weights instead of those in the model's files.
        gradient_checkpointing: recompute activations in backward: less memory, about a third more
            compute. True for all of them, or ``Recompute`` to choose.
        cast_lm_head_to_fp32: compute logits in float32 even if the Trainer's precision has 16 bits.

    Raises:
        ConfigError: for an argument that the library decides itself.
    """

    trust_remote_code: bool = False
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    random_init: bool = False
    gradient_checkpointing: bool | Recompute = False
    cast_lm_head_to_fp32: bool = False

    def __post_init__(self) -> None:
        for name in self.model_kwargs:
            if name in REFUSED:
                raise ConfigError(f"model_kwargs.{name} cannot be set: {REFUSED[name]}")

    @property
    def of_model(self) -> dict[str, Any]:
        """Arguments for models and their configurations."""
        return {"trust_remote_code": self.trust_remote_code, **self.model_kwargs}

    @property
    def of_files(self) -> dict[str, Any]:
        """Arguments for tokenizers and processors."""
        given = {name: v for name, v in self.model_kwargs.items() if name in OF_FILES}
        return {"trust_remote_code": self.trust_remote_code, **given}

    def copy_code(self, model: str, directory: str | Path) -> None:
        """Copy a model's own code into a directory that others will load."""
        if self.trust_remote_code and Path(model).is_dir():
            for file in Path(model).glob("*.py"):
                shutil.copy(file, directory)


def has_code_of_its_own(error: Exception) -> bool:
    """Tell whether this is transformers' refusal to run code that comes with a model."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


DTYPES = ("float32", "bfloat16", "float16")
"""Floating-point dtypes that models compute in."""


def dtype_of(owner: str, name: str) -> torch.dtype:
    """Return the dtype that an argument of ``owner`` names.

    Raises:
        ConfigError: unless it is a floating-point dtype that models compute in.
    """
    if name not in DTYPES:
        raise ConfigError(f"{owner}(dtype={name!r}) must be one of {', '.join(DTYPES)}")
    result: torch.dtype = getattr(torch, name)
    return result


def device_of(name: str | None) -> torch.device:
    """Return a named device; None: a GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_config(model: str, loading: Loading = Loading()) -> PretrainedConfig:
    """Load the configuration of a model directory or hub name.

    Raises:
        ConfigError: if there is none, it needs code that is not trusted, or names a hub kernel.
    """
    require_local(model)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **loading.of_model)
    except (OSError, ValueError) as error:
        raise ConfigError(not_found(model, "configuration", error)) from error
    named = getattr(config, "_attn_implementation", None)
    if "/" in str(named):  # transformers would fetch it, and run it
        raise ConfigError(
            f"model={model!r}: its config.json names a kernel of the hub's, _attn_implementation="
            f"{named!r}, which is code; remove that line, since {REFUSED['_attn_implementation']}"
        )
    return config


def positions_of(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model can read; None if nothing in it depends on positions."""
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if positions is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return positions
    first = rope.get("original_max_position_embeddings") or positions  # before they are stretched
    return max(positions, int(first * rope.get("factor", 1)))


def lm_class(config: PretrainedConfig) -> Any:
    """Return the auto class of a configuration's model: a causal LM, with or without pictures.

    Raises:
        ConfigError: if the model reads pictures in a way that is not supported.
    """
    if family_of(config) is not None:
        return AutoModelForImageTextToText
    kind = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    if kind is not None and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{kind.__name__} reads pictures in a way that is not supported; use one of "
            f"{supported()}"
        )
    return AutoModelForCausalLM


def load_lm(
    model: str, loading: Loading, quantization: Quantization | None = None
) -> PreTrainedModel:
    """Load the causal LM of a model directory or hub name; on the meta device only its shapes.

    Args:
        model: the model's directory or name.
        loading: how its files are read, if its weights are not random.
        quantization: the form of its linear layers; None: not quantised.

    Raises:
        ConfigError: if files are missing or damaged, or packed scoring does not support the model.
    """
    require_docstrings()
    require_local(model)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report on a refused model fills a page
    try:
        try:
            lm = _made(model, loading, quantization, ATTENTION)
        except KeyError:  # an architecture with its own table of attentions
            lm = _made(model, loading, quantization, None)
        keep_own_attention(lm)
        if quantization is not None:
            require_finite(model, lm.named_parameters())  # while they are numbers
            quantize(lm, quantization)
        lm = lm.to(torch.get_default_device())  # Lightning's, in configure_model
        require_finite(model, lm.named_parameters())
    except ConfigError:
        raise
    except UnpicklingError as error:
        raise ConfigError(
            f"model={model!r}: its weights are pickles of more than tensors, which could run code; "
            "use a model in safetensors"
        ) from error
    except (OSError, ValueError, SafetensorError, KeyError) as error:
        raise ConfigError(not_found(model, "causal LM", error)) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    return lm


def keep_own_attention(lm: PreTrainedModel) -> None:
    """Let the model make masks for its own attention if its layers ignore which one is set."""
    if lm.config._attn_implementation == ATTENTION and not lm._can_set_attn_implementation():
        lm.config._attn_implementation = "eager"


def _made(
    model: str,
    loading: Loading,
    quantization: Quantization | None,
    attention_name: str | None,
) -> PreTrainedModel:
    """Load the model with this attention; None: with its own."""
    if without_weights():
        return skeleton(load_config(model, loading), loading, attention_name)
    if loading.random_init:
        with torch.device("cpu"):  # the same numbers for every device
            return skeleton(load_config(model, loading), loading, attention_name)
    return _read_lm(model, loading, quantization, attention_name)


def of_same_weights(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules that shares its parameters.

    Modules added to one, such as adapters, are not in the other.
    """
    return deepcopy(lm, {id(parameter): parameter for parameter in lm.parameters()})


def _read_lm(
    model: str, loading: Loading, quantization: Quantization | None, attention_name: str | None
) -> PreTrainedModel:
    packed, config = None, load_config(model, loading)
    if quantization is not None:
        if getattr(config, "quantization_config", None):
            raise ConfigError(
                f"model={model!r} is quantised already, and lora.quantization would round it a "
                "second time; use the model that it was made from"
            )
        packed = PackedReading(quantization, torch.get_default_device())
    with torch.device("cpu"):  # transformers needs accelerate to load to another
        # Master weights in float32; Trainer(precision=...) decides what computes.
        lm, info = lm_class(config).from_pretrained(
            model,
            dtype=torch.float32,
            attn_implementation=attention_name and attention(config, attention_name),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in our words
            quantization_config=packed,
            **loading.of_model,
        )
    if packed is not None:
        info["mismatched_keys"] = {*info["mismatched_keys"], *packed.mismatched}
    require_complete(model, info)
    return cast(PreTrainedModel, lm)


def weight_bytes(
    model: str, loading: Loading, dtype: torch.dtype, kind: type[AutoModel] | None = None
) -> int:
    """Return the bytes of a model's weights in a dtype, from its configuration alone.

    ``kind`` is the auto class that loads it; None: a causal LM's.

    Raises:
        ConfigError: if there is no configuration, or it is not one of such a model.
    """
    config = load_config(model, loading)
    try:
        with torch.device("meta"):
            lm = skeleton(config, loading, None, kind)
    except ValueError as error:
        raise ConfigError(not_found(model, "model of this kind", error)) from error
    return dtype.itemsize * sum(weight.numel() for weight in lm.parameters())


def require_local(model: str) -> None:
    """Refuse a missing directory at once, before the hub is asked for it repeatedly.

    Raises:
        ConfigError: if ``model`` is a path without a directory.
    """
    parts = Path(model).parts
    # A hub name is `name` or `owner/name`; anything else, or in a directory that exists, is a path.
    in_directory = len(parts) == 2 and Path(parts[0]).is_dir()
    is_path = len(parts) > 2 or in_directory or model.startswith((".", "/", "~"))
    if is_path and not Path(model).is_dir():
        raise ConfigError(
            f"model={model!r}: there is no such directory (working directory: {Path.cwd()}); check "
            "the path"
        )


def not_found(model: str, what: str, error: Exception) -> str:
    if has_code_of_its_own(error):
        return (
            f"model={model!r} comes with code of its own, which would run with your rights; read "
            "it, then set trust_remote_code: true"
        )
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    hint = (
        "the directory exists, but a file in it is missing or damaged"
        if Path(model).is_dir()
        else "there is no such directory; check the path or, for a hub name, the network"
    )
    return f"model={model!r}: cannot load a {what} ({hint}) [{first_line}]"


class GivenModel(str):
    """The directory of a model's copy, removed with the last reference to this object.

    ``origin`` is where transformers read the model; empty: nowhere.
    """

    directory: TemporaryDirectory[str]
    origin: str

    def __deepcopy__(self, memo: Any) -> "GivenModel":
        return self


def model_of(value: Any) -> Any:
    """Write a model object, or a pair of model and tokenizer, to a directory; return a name as is.

    Trainer, engine, reference and export each load what they need from there. The object itself is
    not trained. Without a tokenizer, that of the model's ``name_or_path`` is used.

    Raises:
        ConfigError: if a copy would not be the same model, or there is no tokenizer.
    """
    pair = isinstance(value, tuple | list) and len(value) == 2
    lm, tokenizer = value if pair else (value, None)
    if not isinstance(lm, nn.Module):
        return value
    _require_plain(lm)
    directory = TemporaryDirectory(prefix="lightning_rl_model_")
    written = cast(PreTrainedModel, copy(lm))  # of the same weights: the given one stays as it is
    if written.can_generate():
        written.generation_config = repaired(written.generation_config, type(lm).__name__)
    written.save_pretrained(directory.name)
    (_tokenizer_of(lm) if tokenizer is None else tokenizer).save_pretrained(directory.name)
    given = GivenModel(directory.name)
    given.directory, given.origin = directory, str(written.config.name_or_path)
    return given


_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([^/]+)$")


def base_of(model: str, loading: Loading) -> tuple[str, str | None]:
    """Return the name by which others find the model, and its revision (None: the latest).

    Of a snapshot in the hub's cache that is the hub's name, of an object where transformers read
    it, of any other folder its whole path.
    """
    name = getattr(model, "origin", model)
    path = str(Path(name).absolute()) if name and Path(name).is_dir() else name
    if cached := _SNAPSHOT.search(path):
        return cached[1].replace("--", "/"), cached[2]
    return path, loading.model_kwargs.get("revision")


def _require_plain(lm: nn.Module) -> None:
    """Refuse a model that ``from_pretrained`` would not load as the same.

    Raises:
        ConfigError: if so.
    """
    kind = type(lm).__name__
    if not isinstance(lm, PreTrainedModel):
        raise ConfigError(
            f"model: expected a directory, a hub name or a transformers PreTrainedModel, got "
            f"{kind}; for a peft model pass merge_and_unload(), or train adapters by lora=LoRA()"
        )
    if hasattr(lm, "peft_config"):
        raise ConfigError(
            f"model: this {kind} has an adapter; pass the model without it, and lora=LoRA() to "
            "train one"
        )
    auto = lm_class(lm.config)
    usual = auto._model_mapping.get(type(lm.config), None)
    if type(lm) is not usual:
        raise ConfigError(
            f"model: {kind} is not what {auto.__name__} makes of a {type(lm.config).__name__}"
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
    """Tell whether models are built with shapes only (``with torch.device("meta"):``)."""
    return torch.get_default_device().type == "meta"


def skeleton(
    config: PretrainedConfig,
    loading: Loading,
    attention_name: str | None,
    kind: type[AutoModel] | None = None,
) -> PreTrainedModel:
    """Return the model of ``from_pretrained`` in float32, without reading its weights."""
    made: PreTrainedModel = (kind or lm_class(config)).from_config(
        config,
        attn_implementation=attention_name and attention(config, attention_name),
        trust_remote_code=loading.trust_remote_code,
    )
    return made.float()
