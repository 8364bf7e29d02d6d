"""A Python script that starts a trainer of TRL, read as the values of its configuration."""

from dataclasses import dataclass, field
from typing import Any

from lightning_rl.convert.distillation_trl import defaults_of
from lightning_rl.convert.peft import KEY
from lightning_rl.convert.python_script import PythonScript
from lightning_rl.convert.python_values import Called, Local, Named, Unread, plain
from lightning_rl.convert.trainers_trl import trainer_of
from lightning_rl.errors import ConfigError

_OF_ROWS = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_COMPARED = ("model", "ref_model", *_OF_ROWS[1:])
_OF_ANSWERS = ("model", "teacher_model", "args", "data_collator", "train_dataset", "eval_dataset")
_TRAINERS = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "DistillationTrainer": ("model", "teacher_model", "args", "train_dataset", "eval_dataset"),
    "ServerDistillationTrainer": ("model", "args", "train_dataset", "eval_dataset"),
    "GKDTrainer": _OF_ANSWERS,
    "GOLDTrainer": _OF_ANSWERS,
    "SFTTrainer": _OF_ROWS,
    "RewardTrainer": _OF_ROWS,
    "DPOTrainer": _COMPARED,
    "KTOTrainer": _COMPARED,
}
"""The trainers that are read, with their positional arguments."""
_CONFIGS = {name.replace("Trainer", "Config") for name in _TRAINERS}
_ELSEWHERE = {
    "tools": "tools belong to an agent here: data.agent with a ToolAgent",
    "environment_factory": "an environment belongs to an agent here: data.agent with MultiTurn",
    "rollout_func": "an agent makes the rollouts here: data.agent",
    "callbacks": "callbacks of transformers; write Lightning's under trainer.callbacks",
    "ref_model": "write model.reference: a FrozenReference with its model",
    "formatting_func": "write rows with a prompt and a completion, or messages",
    "optimizers": "write model.optimizer and model.lr_scheduler",
}
_LORA = {"r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "bias"}
_LORA |= {"use_rslora", "use_dora", "target_parameters", "task_type"}


@dataclass
class ReadScript:
    """The settings of a script, those that could not be read, and remarks on how others were."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    trainer: str | None = None

    def put(self, name: str, value: Any, what: str | None = None) -> None:
        """Keep a value if it is known, otherwise note it as missing."""
        what = what or name
        if isinstance(value, dict):
            known = {
                key: inner for key, inner in value.items() if self._known(f"{what}.{key}", inner)
            }
            self.values[name] = {key: _text(inner) for key, inner in known.items()}
        elif self._known(what, value):
            self.values[name] = _text(value)

    def _known(self, what: str, value: Any) -> bool:
        if plain(value) or isinstance(value, Named):
            return True
        self.missing.append(f"{what}: {said_of(value)} could not be read; TRL's default is used")
        return False


def said_of(value: Any) -> str:
    """Return how the script writes an unknown value, and where."""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return ", ".join(said_of(item) for item in items if not plain(item))
    if isinstance(value, Unread):
        return f"{value.text} (line {value.line})"
    if isinstance(value, Called):
        return f"{value.what}(...) (line {value.line})"
    return value.path if isinstance(value, Named) else f"{value.node.name}()"


def _text(value: Any) -> Any:
    """Convert tuples to lists, and imported objects to their names: ``torch.bfloat16``."""
    if isinstance(value, Named):
        return value.path
    return list(value) if isinstance(value, tuple) else value


def read_trl_script(text: str, place: str) -> ReadScript:
    """Read the arguments that a script gives a trainer, its config, LoraConfig and load_dataset.

    Raises:
        ConfigError: if it calls neither a trainer of ``_TRAINERS`` nor the config of one, or cannot
            be read.
    """
    script = PythonScript(text, place, (*_TRAINERS, *_CONFIGS))
    trainers = [call for call in script.calls if call.last in _TRAINERS]
    configs = [call for call in script.calls if call.last in _CONFIGS]
    if not trainers and not configs:
        others = sorted({call.last for call in script.calls if call.last.endswith("Trainer")})
        found = f" (it starts {', '.join(others)})" if others else ""
        raise ConfigError(
            f"{place}: it has no call of GRPOTrainer, SFTTrainer, ... or its config{found}"
        )
    trainer = trainers[0] if trainers else Called(configs[0].last.replace("Config", "Trainer"))
    given = dict(zip(_TRAINERS[trainer.last], trainer.args, strict=False)) | trainer.kwargs
    result = ReadScript(defaults_of(trainer.last), trainer=trainer_of(trainer.last))
    if len(trainers) > 1:
        called = ", ".join(call.last for call in trainers)
        result.missing.append(f"{len(trainers)} trainers ({called}): the first is converted")
    config = given.get("args", configs[0] if configs else None)
    _config(config, trainer.last.replace("Trainer", "Config"), result)
    _model(given.get("model"), "", result)
    _model(given.get("teacher_model"), "teacher_", result)
    _adapters(given.get(KEY), result)
    _rewards(given.get("reward_funcs"), result)
    _data("train", given.get("train_dataset"), result)
    _data("test", given.get("eval_dataset"), result)
    result.missing += [f"{n}: {why}" for n, why in _ELSEWHERE.items() if given.get(n) is not None]
    if script.defaults:
        said = ", ".join(
            f"{name}={value!r}" for name, value in script.defaults.items() if plain(value)
        )
        result.remarks.append(f"arguments of the script have their defaults: {said[:400]}")
    return result


def _config(config: Any, name: str, result: ReadScript) -> None:
    if config is None:  # TRL's defaults
        return
    if not isinstance(config, Called):
        result.missing.append(f"{name}: {said_of(config)} could not be read")
        return
    if config.receiver is not None:
        result.missing.append(
            f"{name}: its values come from the command line or a file; convert what starts "
            "the script, too"
        )
    for name, value in (
        dict(zip(("output_dir",), config.args, strict=False)) | config.kwargs
    ).items():
        result.put(name, value)


def _model(model: Any, prefix: str, result: ReadScript) -> None:
    if isinstance(model, Called) and model.last == "get_peft_model":
        wrapped = [*model.args, *model.kwargs.values()]
        named = {name: value for name, value in model.kwargs.items() if name in _LORA}
        lora = next((a for a in wrapped if isinstance(a, Called) and a.last == "LoraConfig"), None)
        _adapters(lora or Called("LoraConfig", [], named, model.line), result)
        model = next(iter(wrapped), None)
    if isinstance(model, Called) and model.last == "from_pretrained":
        names = ("pretrained_model_name_or_path", "model_name")
        name = next((model.kwargs.pop(n) for n in names if n in model.kwargs), None)
        result.put(f"{prefix}model_name_or_path", model.args[0] if model.args else name)
        if model.kwargs:
            result.put(f"{prefix}model_init_kwargs", model.kwargs)
    elif model is not None:
        result.put(f"{prefix}model_name_or_path", model, f"{prefix}model")


def _adapters(peft: Any, result: ReadScript) -> None:
    if isinstance(peft, Called) and peft.last == "LoraConfig":
        named = {name: value for name, value in peft.kwargs.items() if name != "task_type"}
        result.put(KEY, named)
    elif peft is not None:
        result.missing.append(f"{KEY}: {said_of(peft)} could not be read; no adapters are written")


def _rewards(rewards: Any, result: ReadScript) -> None:
    listed = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    found: list[str] = []
    for reward in listed:
        if isinstance(reward, Local):
            found.append(f"MODULE.{reward.node.name}")
            result.missing.append(
                f"data.rewards: {reward.node.name} is a function of the script: move it to a "
                "module of its own, and write that for MODULE"
            )
        elif isinstance(reward, Named | str):
            found.append(reward.path if isinstance(reward, Named) else reward)
        elif reward is not None:
            result.missing.append(
                f"data.rewards: {said_of(reward)} could not be read; write its import path"
            )
    if found:
        result.values["reward_funcs"] = found


def _data(split: str, data: Any, result: ReadScript) -> None:
    """Follow a data set back to where it is loaded, noting how the script changes its rows."""
    names = {"train": "data.train_prompts", "test": "data.eval_prompts"}
    changed: list[str] = []
    part = None
    while isinstance(data, Called) and data.receiver is not None:
        if data.what == "[]":
            part = data.args[0] if isinstance(data.args[0], str) else part
        else:
            changed.append(data.last)
        data = data.receiver
    if data is None:
        return
    if not isinstance(data, Called) or data.last not in ("load_dataset", "load_from_disk"):
        result.missing.append(f"{names[split]}: {said_of(data)} could not be read")
        return
    if changed:
        result.missing.append(
            f"{names[split]}: rows as they are loaded in line {data.line}; the script goes on with "
            f"{', '.join(reversed(changed))}, which is not carried over: write what comes of it to "
            "a file"
        )
    given = dict(zip(("path", "name"), data.args, strict=False)) | data.kwargs
    path = given.get("dataset_path", given.get("path"))
    files = given.get("data_files")
    part = given.get("split", part)
    if isinstance(files, dict):
        files = files.get(split, files.get(part))
    if split == "train":
        result.put("dataset_name", path if files is None else files)
        if given.get("name") is not None:
            result.put("dataset_config", given["name"])
    if part is not None:
        result.put(f"dataset_{split}_split", part)
