"""Checks of a model: its files, and its weights."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.errors import ConfigError, NonFiniteWeightsError
from lightning_rl.run.processes.dist import any_rank
from lightning_rl.run.warnings import rank_zero_warn

_WEIGHTS = "*.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "sentencepiece*", "*.tiktoken")
# Placeholders of pictures and sounds, which no text holds, may exceed a text model's embedding.
_OTHER_MODALITY = re.compile("image|video|audio|vision|speech", re.IGNORECASE)
_SHOWN = 3
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def require_sound(directory: Path, weights: bool) -> None:
    """Check the files of a model directory, with its ``weights`` if it does not start from others.

    Reading the weights also brings them into the page cache, for loading.

    Raises:
        ConfigError: if a file is missing or damaged; names it, and what is wrong with it.
    """
    _require_config(directory)
    if not any(path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern)):
        raise ConfigError(
            f"{directory} has no tokenizer (tokenizer.json and tokenizer_config.json); save the "
            "model's tokenizer there"
        )
    # Other formats have to be loaded to find out.
    for path in sorted(directory.glob(_WEIGHTS)) if weights else ():
        _require_readable(path)


def require_complete(model: str, info: dict[str, Any]) -> None:
    """Check the info of ``from_pretrained(..., output_loading_info=True)``.

    Raises:
        ConfigError: if weights are missing (they would be random), or have the wrong shape.
    """
    if mismatched := sorted(info["mismatched_keys"]):
        name, in_file, expected = mismatched[0]
        raise ConfigError(
            f"{_file_of(model, name)}: {name} has the shape {tuple(in_file)}, but config.json asks "
            f"for {tuple(expected)} ({len(mismatched)} weights differ); one of the two files "
            "belongs to another model: replace it"
        )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"{_file_of(model)} lacks {', '.join(missing[:_SHOWN])}{more}, which config.json asks "
            "for, and which would be random; download the model again, or correct config.json"
        )
    if left := sorted(info["unexpected_keys"]):
        rank_zero_warn(
            f"{_file_of(model)} holds {len(left)} weights that config.json does not ask for "
            f"({', '.join(left[:_SHOWN])}); they are left out"
        )


def held(directory: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype | None]]:
    """Yield name, shape and dtype of the weights in a directory's safetensors files.

    They are read from the headers. The dtype is None if torch cannot compute with it.
    """
    for path in sorted(directory.glob(_WEIGHTS)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), _DTYPES.get(part.get_dtype())


def compare(lm: PreTrainedModel, found: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Compare names and shapes in files with the model's, for :func:`require_complete`.

    If files also have other names, such as those of a base model or a second format, only loading
    shows what is missing.
    """
    expected = {name: tuple(weight.shape) for name, weight in lm.state_dict().items()}
    other = found.keys() - expected.keys()
    tied = getattr(lm, "all_tied_weights_keys", {})
    missing = expected.keys() - found.keys() - tied.keys()
    both = expected.keys() & found.keys()
    return {
        "mismatched_keys": [(n, found[n], expected[n]) for n in both if found[n] != expected[n]],
        "missing_keys": [] if other else missing,
        "unexpected_keys": [],
    }


def require_finite(model: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Check that no weight is NaN, infinite or unusable.

    Raises:
        ConfigError: if one is; names the first such tensor, and its file.
    """
    for name, weight in weights:
        if not is_usable(weight):
            broken = int((~(weight.abs() < LARGEST_WEIGHT)).sum())
            raise ConfigError(
                f"{_file_of(model, name)}: {name} holds {broken} of {weight.numel()} numbers that "
                f"are NaN or infinite, or beyond {LARGEST_WEIGHT:g}; the training that wrote it "
                "had diverged: use an earlier checkpoint"
            )


def of_other_modality(token: str) -> bool:
    """Return True for a token that stands for a picture, a sound or a video."""
    return _OTHER_MODALITY.search(token) is not None


def require_embedded(model: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Check that every token has a row in the embedding.

    Raises:
        ConfigError: if not; names tokens without a row.
    """
    vocabulary = tokenizer.get_vocab()
    beyond = [token for token, index in vocabulary.items() if index >= rows]
    beyond = [token for token in beyond if not of_other_modality(token)]
    if beyond:
        shown = ", ".join(repr(token) for token in beyond[:_SHOWN])
        local = Path(model).is_dir()
        where = Path(model, "tokenizer.json") if local else f"the tokenizer of {model}"
        raise ConfigError(
            f"{where} knows tokens up to {max(vocabulary.values())}, but "
            f"the embedding has {rows} rows (config.json: vocab_size), so {len(beyond)} tokens "
            f"({shown}) have none; save the model's own tokenizer there, or resize its embedding "
            "(resize_token_embeddings) and train the new rows"
        )


LARGEST_WEIGHT = 1e19
"""Largest usable weight in float32 or bfloat16: the product of two such weights is infinite."""


def is_usable(weight: Tensor) -> bool:
    """Tell whether all numbers and their products are finite, in one pass without a copy."""
    if weight.numel() == 0 or weight.is_meta or not weight.is_floating_point():
        return True
    low, high = torch.aminmax(weight.detach())  # NaN comes through
    return bool((low > -LARGEST_WEIGHT) & (high < LARGEST_WEIGHT))


def _require_config(directory: Path) -> None:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no config.json, so it is not a model; correct the path"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("auto_map")):
        raise ConfigError(
            f"{path} has no model_type, which says what architecture it is (such as 'qwen2'); "
            "restore the model's own config.json"
        )


def _require_readable(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:  # reads the header, and compares the size
            names = file.keys()
            require_finite(str(path), ((name, file.get_tensor(name)) for name in names))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} ({path.stat().st_size} bytes) is truncated or damaged ({error}); download or "
            "copy it again"
        ) from error


def _file_of(model: str, name: str | None = None) -> str:
    """Return the file of a weight, if known."""
    directory = Path(model)
    index = directory / "model.safetensors.index.json"
    if not directory.is_dir():
        return model
    if not index.is_file():
        files = [path for path in directory.glob(_WEIGHTS) if path.is_file()]
        return str(files[0]) if len(files) == 1 else model
    files_of = json.loads(index.read_bytes())["weight_map"]
    return str(directory / files_of[name]) if name in files_of else str(index)


ADVICE = (
    "an update made them so: lower the learning rate or max_grad_norm, and go on from the last "
    "checkpoint, which is good"
)


def non_finite(module: nn.Module) -> str | None:
    """Return the first unusable parameter on this rank, looking at its own shards; None if none."""
    for name, parameter in module.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not is_usable(part):
            return name
    return None


def require_finite_weights(module: nn.Module, doing: str) -> None:
    """Check all weights, on every rank, in one pass over them.

    Args:
        module: the module to check.
        doing: what would be done with the weights, for the message: "saved as ...".

    Raises:
        NonFiniteWeightsError: on all ranks, if any weight of any rank is NaN or infinite, or so
            large that its products are.
    """
    found = non_finite(module)
    if any_rank(found is not None):
        raise NonFiniteWeightsError(
            "the trainer's weights are NaN or infinite, or what is computed with them will be "
            f"({found or 'on another rank'}), so they are not {doing}; {ADVICE}"
        )
