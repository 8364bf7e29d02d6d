"""A Python script that starts a trainer of TRL, read as the values of its configuration."""

import ast
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.convert.peft import KEY
from lightning_rl.convert.python_script import Called, Named, PythonScript, Unread, plain
from lightning_rl.convert.trainers_trl import trainer_of
from lightning_rl.errors import ConfigError

_OF_ROWS = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_COMPARED = ("model", "ref_model", *_OF_ROWS[1:])
_OF_ANSWERS = ("model", "teacher_model", *_OF_ROWS[1:])
_TRAINERS = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "AsyncGRPOTrainer": ("model", "reward_funcs", "args", "train_dataset"),
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
    """The settings of a script, and those that could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    trainer: str | None = None

    def put(self, name: str, value: Any, what: str | None = None) -> None:
        """Keep a value if it is known, otherwise note it as missing."""
        what = what or name
        if isinstance(value, dict):
            known = ReadScript(missing=self.missing)
            for key, inner in value.items():
                known.put(key, inner, f"{what}.{key}")
            self.values[name] = known.values
        elif plain(value):
            self.values[name] = value
        elif isinstance(value, Named) and value.path.startswith("torch."):  # torch.bfloat16
            self.values[name] = value.path
        else:
            self.miss(what, value, "TRL's default is used")

    def miss(self, what: str, value: Any, instead: str = "") -> None:
        """Note a value that could not be read."""
        message = f"{what}: {said_of(value)} could not be read"
        self.missing.append(f"{message}; {instead}" if instead else message)


def said_of(value: Any) -> str:
    """Return how the script writes an unknown value, and where."""
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return ", ".join(said_of(item) for item in items if not plain(item))
    if isinstance(value, Unread):
        return f"{value.text} (line {value.line})"
    if isinstance(value, Called):
        return f"{value.what}(...) (line {value.line})"
    return str(getattr(value, "path", value))


def read_trl_script(text: str, place: str) -> ReadScript:
    """Read the arguments that a script gives a trainer, its config, LoraConfig and load_dataset.

    Raises:
        ConfigError: if it calls neither a trainer of ``_TRAINERS`` nor the config of one, or cannot
            be read.
    """
    script = PythonScript(text, place)
    try:
        return _read(script)
    except RecursionError as error:
        raise ConfigError(f"{place} cannot be read: its values are nested too deeply") from error


def _read(script: PythonScript) -> ReadScript:
    trainers = script.called(*_TRAINERS)
    configs = script.called(*(name.replace("Trainer", "Config") for name in _TRAINERS))
    if not trainers and not configs:
        named = (ast.unparse(call.func).rpartition(".")[2] for call in script.calls)
        others = sorted({name for name in named if name.endswith("Trainer")})
        found = f" (it starts {', '.join(others)})" if others else ""
        raise ConfigError(
            f"{script.place}: it has no call of GRPOTrainer, SFTTrainer, ... or its config{found}"
        )
    trainer = trainers[0] if trainers else Called(configs[0].what.replace("Config", "Trainer"))
    given = dict(zip(_TRAINERS[trainer.what], trainer.args, strict=False)) | trainer.kwargs
    result = ReadScript(trainer=trainer_of(trainer.what))
    if len(trainers) > 1:
        called = ", ".join(call.what for call in trainers)
        result.missing.append(f"{len(trainers)} trainers ({called}): the first is converted")
    _config(given.get("args"), configs, trainer.what.replace("Trainer", "Config"), result)
    _model(given.get("model"), "", result)
    _model(given.get("teacher_model"), "teacher_", result)
    _adapters(given.get(KEY), result)
    _rewards(given.get("reward_funcs"), result)
    _data("train", given.get("train_dataset"), result)
    _data("test", given.get("eval_dataset"), result)
    result.missing += [f"{n}: {why}" for n, why in _ELSEWHERE.items() if given.get(n) is not None]
    for name in given:
        if name.startswith("**"):
            result.miss(trainer.what, given[name])
    return result


def _config(config: Any, configs: list[Called], name: str, result: ReadScript) -> None:
    """Read a trainer's config, or the only one of the script if the trainer's is not known."""
    if isinstance(config, Called) and config.what.startswith("parse_"):
        result.missing.append(
            f"{name}: its values come from the command line or a file; convert what starts "
            "the script, too"
        )
    elif config is not None and not (isinstance(config, Called) and config.what == name):
        only = len(configs) == 1
        instead = f"the one of line {configs[0].line} is converted" if only else ""
        result.miss(name, config, instead)
        config = configs[0] if only else None
    elif config is None and configs:
        config = configs[0]
    if config is not None:
        args = () if config.what.startswith("parse_") else config.args
        for key, value in (dict(zip(("output_dir",), args, strict=False)) | config.kwargs).items():
            result.put(key, value)


def _model(model: Any, prefix: str, result: ReadScript) -> None:
    if isinstance(model, Called) and model.what == "get_peft_model":
        wrapped = [*model.args, *model.kwargs.values()]
        named = {name: value for name, value in model.kwargs.items() if name in _LORA}
        lora = next((a for a in wrapped if isinstance(a, Called) and a.what == "LoraConfig"), None)
        _adapters(lora or Called("LoraConfig", [], named, model.line), result)
        model = next(iter(wrapped), None)
    if isinstance(model, Called) and model.what == "from_pretrained":
        given = dict(model.kwargs)
        names = ("pretrained_model_name_or_path", "model_name")
        name = next((given.pop(n) for n in names if n in given), None)
        result.put(f"{prefix}model_name_or_path", model.args[0] if model.args else name)
        if given:
            result.put(f"{prefix}model_init_kwargs", given)
    elif model is not None:
        result.put(f"{prefix}model_name_or_path", model, f"{prefix}model")


def _adapters(peft: Any, result: ReadScript) -> None:
    if isinstance(peft, Called) and peft.what == "LoraConfig":
        result.put(KEY, {name: v for name, v in peft.kwargs.items() if name != "task_type"})
    elif peft is not None:
        result.miss(KEY, peft, "no adapters are written")


def _rewards(rewards: Any, result: ReadScript) -> None:
    found: list[str] = []
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        path = getattr(reward, "path", reward)
        if isinstance(path, str):
            found.append(path)
        elif reward is not None:
            result.miss("data.rewards", reward, "write its import path")
        if isinstance(path, str) and path.startswith("MODULE."):
            result.missing.append(
                f"data.rewards: {path.removeprefix('MODULE.')} is a function of the script: move "
                "it to a module of its own, and write that for MODULE"
            )
    if found:
        result.values["reward_funcs"] = found


def _data(split: str, data: Any, result: ReadScript) -> None:
    """Follow a data set back to where it is loaded, noting how the script changes its rows."""
    name = {"train": "data.train_prompts", "test": "data.evaluation.prompts"}[split]
    changed: list[str] = []
    part = None
    while isinstance(data, Called) and isinstance(data.receiver, Called):
        if data.what == "[]":
            part = data.args[0] if isinstance(data.args[0], str) else part
        else:
            changed.append(data.what)
        data = data.receiver
    if data is None:
        return
    if not isinstance(data, Called) or data.what not in ("load_dataset", "load_from_disk"):
        result.miss(name, data)
        return
    if changed:
        result.missing.append(
            f"{name}: rows as they are loaded in line {data.line}; the script goes on with "
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
