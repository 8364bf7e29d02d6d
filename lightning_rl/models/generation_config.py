"""What a model's ``generation_config.json`` says, and what is written in its place."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from lightning_rl.errors import ConfigError

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
"""What is read only where ``do_sample`` is true."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def repaired(given: GenerationConfig, model: str) -> GenerationConfig:
    """One that transformers agrees to write, with a warning of what changed; ``given`` if it does.

    Many models bring one that it reads, and refuses to write: a temperature, say, without
    ``do_sample``.

    Args:
        given: as it was read.
        model: its name, for the warning.
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
    rows = getattr(config.get_text_config(), "vocab_size", math.inf)
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
