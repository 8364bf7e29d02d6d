"""Whether the parts that a conversion names can be made of the numbers that it gives them."""

from typing import Any

from lightning_rl.algos.losses import ValueLoss
from lightning_rl.config.names import public
from lightning_rl.convert.conversion import Conversion
from lightning_rl.errors import ConfigError

PARTS = ("loss", "aggregation", "advantage", "correction", "kl", "kl_reward", "entropy")


def part_of(written: dict[str, Any]) -> Any:
    """The object that a ``class_path`` and its ``init_args`` are."""
    return public(written["class_path"])(**written.get("init_args", {}))


def check_parts(result: Conversion) -> None:
    """Make each part of the update, and rewards of our own, as ``lightning-rl fit`` will.

    Raises:
        ConfigError: if one is refused: convert would have written what nothing can run.
    """
    model = result.config["model"]["init_args"]
    data = result.config["data"]["init_args"]
    try:
        made = {name: part_of(model[name]) for name in PARTS if name in model}
        if "value_loss" in model:
            ValueLoss(**model["value_loss"])
        for reward in data["rewards"]:
            if isinstance(reward, dict):
                part_of(reward)
    except ConfigError as error:
        raise ConfigError(f"what these values amount to here is refused: {error}") from error
    least = made["advantage"].min_group_size
    if data["group_size"] < least:
        raise ConfigError(
            f"{data['group_size']} completions of a prompt, and "
            f"{type(made['advantage']).__name__} compares them: it needs {least}"
        )
