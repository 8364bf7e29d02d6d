"""A model's files: checks, and a skeleton for engines that get weights pushed."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_checks import (
    compare,
    held,
    require_complete,
    require_embedded,
    require_sound,
)
from lightning_rl.models.pretrained import (
    Loading,
    load_config,
    load_lm,
    not_found,
    positions_of,
    require_local,
)
from lightning_rl.models.tokenizer import load_tokenizer, save_tokenizer


def require_sound_model(model: str, loading: Loading = Loading()) -> None:
    """Check that a model can be loaded, without keeping its weights in memory.

    Raises:
        ConfigError: if not; names the file, and what is wrong with it.
    """
    require_local(model)
    folder = Path(model, loading.model_kwargs.get("subfolder", ""))
    if not folder.is_dir():  # a hub name is checked when it is loaded
        return
    require_sound(folder, weights=not loading.random_init)
    if loading.random_init:
        return
    with torch.device("meta"):
        lm = load_lm(model, loading)
    shapes = {name: shape for name, shape, _ in held(folder)}
    if not shapes and not any(file.suffix in (".bin", ".gguf") for file in folder.iterdir()):
        raise ConfigError(not_found(model, "causal LM", OSError("it has no model.safetensors")))
    # Where transformers renames or fuses weights as it reads them, only loading tells.
    if shapes and not get_model_conversion_mapping(lm, add_legacy=False):
        require_complete(str(folder), compare(lm, shapes))
    require_embedded(
        model, load_tokenizer(model, loading), lm.get_input_embeddings().weight.shape[0]
    )


def positions_in(directory: Path, trusted: bool = False) -> int | None:
    """Return how many tokens the models below a directory have positions for, by their
    configurations; None if none says so. The fewest count; ``trusted``: run code beside them.
    """
    loading = Loading(trust_remote_code=trusted)
    configs = [load_config(str(file.parent), loading) for file in directory.rglob("config.json")]
    return fewest_positions(configs)


def fewest_positions(configs: Iterable[PretrainedConfig]) -> int | None:
    """Return how many tokens models of these configurations have positions for.

    The fewest count; None if no configuration says so.
    """
    named = map(positions_of, configs)
    return min((positions for positions in named if positions is not None), default=None)


def save_skeleton(model: str, directory: str | Path, loading: Loading = Loading()) -> None:
    """Write a model's configuration and tokenizer without weights, for an engine to push to.

    Its ``generation_config.json`` holds only the end tokens, because requests bring all sampling
    settings.
    """
    tokenizer = load_tokenizer(model, loading)
    save_tokenizer(tokenizer, directory)
    load_config(model, loading).save_pretrained(directory)
    GenerationConfig(eos_token_id=[*end_tokens_of(tokenizer).token_ids]).save_pretrained(directory)
    loading.copy_code(model, directory)
