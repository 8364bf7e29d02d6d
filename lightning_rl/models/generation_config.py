"""What a model's ``generation_config.json`` says, and what is written in its place."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from lightning_rl.errors import ConfigError


def stated_ends(
    model: str, config: PretrainedConfig, of_files: Mapping[str, Any] | None = None
) -> set[int]:
    """The tokens that ``config.json`` or ``generation_config.json`` calls ends.

    Args:
        model: its directory or name.
        config: what the first of the two says.
        of_files: where the second is, as ``from_pretrained`` is told it.

    Raises:
        ConfigError: if the latter is damaged.
    """
    of_config = GenerationConfig.from_model_config(config).eos_token_id
    stated = {*_listed(of_config), *written_ends(model, of_files)}
    rows = config.get_text_config().vocab_size
    # What has no row in the head cannot be written, and some say -1 where there is none.
    return {end for end in stated if 0 <= end < rows}


def written_ends(model: str, of_files: Mapping[str, Any] | None = None) -> list[int]:
    """The tokens that ``generation_config.json`` calls ends; none if there is no such file.

    Raises:
        ConfigError: if it is damaged.
    """
    hub = {name: v for name, v in (of_files or {}).items() if name != "trust_remote_code"}
    file = cached_file(
        model,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    if file is None:
        return []
    try:
        return _listed(json.loads(Path(file).read_bytes()).get("eos_token_id"))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged, no JSON ({error}); fetch it again") from error


def _listed(ends: int | Sequence[int] | None) -> list[int]:
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
