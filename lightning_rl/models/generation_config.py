"""Reads a model's ``generation_config.json``, and repairs it for export."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from lightning_rl.errors import ConfigError
from lightning_rl.run.warnings import rank_zero_warn

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
"""Settings that count only if ``do_sample`` is true."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def repaired(given: GenerationConfig, model: str) -> GenerationConfig:
    """Return a configuration that transformers can write; warn of changes.

    Many models have one that transformers reads but refuses to write, for example with a
    temperature but without ``do_sample``. One that it can write is returned unchanged.

    Args:
        given: the configuration as read.
        model: the model's name, for the warning.
    """
    if (fault := _fault(given)) is None:
        return given
    sampling = {name: v for name in _SAMPLING if (v := getattr(given, name, None)) is not None}
    # What is set to sample means to; a temperature of 0, or `do_sample: false`, means not to.
    samples = given.do_sample is not False and sampling.get("temperature") != 0
    made = deepcopy(given)
    vars(made).update({"do_sample": True} if samples else dict.fromkeys(sampling))
    change = "do_sample: true" if samples else f"no {', '.join(sampling)}"
    if not sampling or _fault(made) is not None:
        made = GenerationConfig(**{name: getattr(given, name) for name in _TOKENS})
        change = "its special tokens alone"
    rank_zero_warn(
        f"model={model!r}: transformers refuses to write its generation_config.json again "
        f"({fault}); an export has {change}"
    )
    return made


def _fault(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())[:160]
    return None


def stated_ends(
    model: str, config: PretrainedConfig, of_files: Mapping[str, Any] | None = None
) -> set[int]:
    """Return the end tokens of ``config.json`` and ``generation_config.json``.

    Args:
        model: the model's directory or name.
        config: the content of ``config.json``.
        of_files: arguments of ``from_pretrained`` that locate files.

    Raises:
        ConfigError: if ``generation_config.json`` is damaged.
    """
    of_config = GenerationConfig.from_model_config(config).eos_token_id
    stated = {*_listed(of_config), *written_ends(model, of_files)}
    rows = getattr(config.get_text_config(), "vocab_size", math.inf)
    # What has no row in the head cannot be written, and some say -1 where there is none.
    return {end for end in stated if 0 <= end < rows}


def written_ends(model: str, of_files: Mapping[str, Any] | None = None) -> list[int]:
    """Return the end tokens of ``generation_config.json``; none if there is no such file.

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
        raise ConfigError(f"{file} is not valid JSON ({error}); download it again") from error


def _listed(ends: int | Sequence[int] | None) -> list[int]:
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
