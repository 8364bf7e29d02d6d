"""Check that the parts a conversion names accept the numbers it gives them."""

from typing import Any

from lightning_rl.algos.losses import ValueLoss
from lightning_rl.config.names import public
from lightning_rl.convert.conversion import Conversion
from lightning_rl.errors import ConfigError

PARTS = ("loss", "aggregation", "advantage", "correction", "kl", "kl_reward", "entropy")


def part_of(written: dict[str, Any]) -> Any:
    """Build the object that a ``class_path`` and its ``init_args`` describe, its parts first."""
    name = written["class_path"].rpartition(".")[2]  # some stand with their import paths
    return public(name)(**{n: _built(value) for n, value in written.get("init_args", {}).items()})


def _built(value: Any) -> Any:
    return part_of(value) if isinstance(value, dict) and "class_path" in value else value


def check_parts(result: Conversion) -> None:
    """Build each part of the update, and our own rewards, as ``lightning-rl fit`` will.

    Rewards that are models are not built: the directories may be another machine's.

    Raises:
        ConfigError: if one is refused: convert would have written a configuration that cannot run.
    """
    model = result.config["model"]["init_args"]
    data = result.config["data"]["init_args"]
    try:
        made = {name: part_of(model[name]) for name in PARTS if name in model}
        if "critic" in model:
            ValueLoss(**model["critic"]["loss"])
        for reward in data["rewards"]:
            if isinstance(reward, dict) and "model" not in reward["init_args"]:
                part_of(reward)
    except ConfigError as error:
        raise ConfigError(f"these values convert to settings that are refused: {error}") from error
    least = made["advantage"].min_group_size
    if data["group_size"] < least:
        raise ConfigError(
            f"{data['group_size']} completions per prompt: "
            f"{type(made['advantage']).__name__} compares them, and needs at least {least}"
        )
