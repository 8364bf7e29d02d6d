"""The data set and the rewards that TRL's script specifies."""

import os
import re
from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, as_list, instance, prompts_from
from lightning_rl.convert.shared_trl import strategy
from lightning_rl.errors import ConfigError

_IMPORT_PATH = re.compile(r"\w+(\.\w+)+")
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def put_data(given: Given, result: Conversion) -> None:
    """Set the prompts to train on."""
    shuffle = {} if given["shuffle_dataset"] else {"shuffle": False}
    if given["data_seed"] is not None:
        shuffle["seed"] = given["data_seed"]
    prompts = _prompts(given, "dataset_train_split", **shuffle)
    if prompts is None:
        result.missing.append(
            "data.train_prompts: a file or folder of prompts, or HFDatasetPrompts with the name of "
            "a dataset on the hub"
        )
        if given.look("dataset_name") is not None:
            result.leave(
                given, "dataset_name", "it does not exist here; name it in HFDatasetPrompts"
            )
    written = prompts or instance("JSONLPrompts", path="PROMPTS.jsonl", **shuffle)
    result.put("data.train_prompts", written)


def put_rows(given: Given, result: Conversion, heldout: str | None) -> None:
    """Set the rows to learn from, and the held-out ones if there is a validation."""
    for theirs, ours, stands_for in (
        ("dataset_train_split", "data.train", "ROWS.jsonl"),
        ("dataset_test_split", "data.val", "HELDOUT.jsonl"),
    ):
        held = ours == "data.val"
        if held and heldout is None and strategy(given, "eval_strategy") == "no":
            continue
        found = prompts_from(heldout, given[theirs]) if held and heldout else None
        alone = held and os.path.isfile(given["dataset_name"] or "")  # which has no split
        found = found or (None if alone else _prompts(given, theirs))
        if found is None:
            name = f"dataset_name {given['dataset_name']}, {theirs} {given[theirs]}"
            result.missing.append(f"{ours}: a file or folder of rows, or HFDatasetPrompts ({name})")
        result.put(ours, found or prompts_from(stands_for, None))


def _prompts(given: Given, split: str, **options: Any) -> dict[str, Any] | None:
    """Return prompts of a file, folder or hub data set, from the split named by ``split``."""
    name = given["dataset_name"]
    if name is not None and os.path.exists(name):  # Path's raises where no path is so long
        return prompts_from(name, given[split], **options)
    if name is None or not _HUB_NAME.fullmatch(name):
        return None
    part = {} if given["dataset_config"] is None else {"name": given["dataset_config"]}
    return instance("HFDatasetPrompts", path=name, **part, split=given[split], **options)


def put_rewards(given: Given, result: Conversion) -> None:
    """Set the rewards, and their weights."""
    names = [*as_list(given["reward_model_name_or_path"]), *as_list(given["reward_funcs"])]
    weights = given["reward_weights"] or [None] * len(names)
    if names and len(weights) != len(names):
        raise ConfigError(f"reward_weights: {len(weights)} for {len(names)} reward_funcs")
    both = [(_reward(name), weight) for name, weight in zip(names, weights, strict=False)]
    carried = [(reward, weight) for reward, weight in both if reward is not None]
    if len(carried) < len(names):
        result.leave(given, "reward_funcs")
    if not carried:
        result.missing.append("data.rewards: import paths of your reward functions")
        result.put("data.rewards", ["MODULE.FUNCTION"])
        if given["reward_weights"] is not None:
            result.leave(given, "reward_weights", "one per reward: write them with the rewards")
        return
    result.put("data.rewards", [reward for reward, _ in carried])
    if given["reward_weights"] is not None:
        result.put("data.reward_weights", [weight for _, weight in carried])


def put_heldout(given: Given, result: Conversion, path: str | None) -> None:
    """Set the held-out prompts, from ``path`` or the data set's test split."""
    split = given["dataset_test_split"]
    name = given.look("dataset_name")
    found = prompts_from(path, split) if path is not None else None
    if path is None and not os.path.isfile(name or ""):  # which has no split
        found = _prompts(given, "dataset_test_split")
    if found is None:
        found = prompts_from("HELDOUT.jsonl", split)
        result.missing.append(f"data.evaluation.prompts: those of dataset_test_split {split}")
    result.put("data.evaluation.prompts", found)


def _reward(name: str) -> Any:
    if name == "get_soft_overlong_punishment":  # TRL's script gives it these bounds
        return instance("lightning_rl.OverlongPenalty", max_tokens=1280, buffer=256)
    if "/" in name:  # a path, or a hub name
        return instance("lightning_rl.ModelReward", model=name)
    return name if _IMPORT_PATH.fullmatch(name) else None
