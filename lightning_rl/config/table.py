"""What a run was configured with, as one flat table of keys, and how two such tables differ."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

Table = dict[str, Any]
_UNKNOWN = object()
_DEPTH = 5


class Change(NamedTuple):
    """A key whose value is another one now."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.then)} then, {_short(self.now)} now"


def flatten(tree: Any, key: str = "") -> Table:
    """Keys as they are written on a command line: ``{"model.loss": "PPOClip", "model.lr": 1e-3}``.

    A class is the value of its key, its arguments come below; callbacks go by the class's name.
    """
    if isinstance(tree, Mapping) and "class_path" in tree:
        arguments = tree.get("init_args") or {}
        return {key: _class_name(str(tree["class_path"]))} | flatten(arguments, key)
    if isinstance(tree, Mapping):
        inner = [flatten(value, f"{key}.{name}".lstrip(".")) for name, value in tree.items()]
        return {name: value for table in inner for name, value in table.items()}
    if isinstance(tree, list | tuple) and any(isinstance(item, Mapping) for item in tree):
        table: Table = {}
        for index, item in enumerate(tree):
            named = isinstance(item, Mapping) and "class_path" in item
            name = _class_name(str(item["class_path"])) if named else str(index)
            table |= flatten(item, f"{key}.{name}")
        return table
    return {key: list(tree) if isinstance(tree, list | tuple) else tree}


def differences(then: Table, now: Table) -> list[Change]:
    """Keys of both whose values differ, without those below such a key; and callbacks of one only.

    A key that only one of them has is one of another release.
    """
    changes: list[Change] = []
    for key in dict.fromkeys([*then, *now]):
        old, new = _value(then, key), _value(now, key)
        callback = key.startswith("trainer.callbacks.") and key.count(".") == 2
        if old == new or (_UNKNOWN in (old, new) and not callback):
            continue
        if not any(key.startswith(f"{change.key}.") for change in changes):
            values = (None if value is _UNKNOWN else value for value in (old, new))
            changes.append(Change(key, *values))
    return changes


def _value(table: Table, key: str) -> Any:
    """Of a key that has others below it instead, as arguments without a class, those."""
    if key in table:
        return table[key]
    below = {n.removeprefix(f"{key}."): v for n, v in table.items() if n.startswith(f"{key}.")}
    return below or _UNKNOWN


def described(module: Any, data: Any, trainer: Any) -> Table:
    """The table of a run that a script put together, as far as its objects tell."""
    tree = {"model": _described(module), "data": _described(data)}
    table = flatten(tree) | {"trainer.precision": str(trainer.precision)}
    table = {key: value for key, value in table.items() if value is not _UNKNOWN}
    return table | _optimizer(module)


def config_files(directory: Path) -> dict[int, Path]:
    """A run's configurations, by the iteration after which each holds; config.yaml's is 0."""
    later = directory.glob("config_*.yaml")
    numbers = {p.stem.removeprefix("config_"): p for p in later}
    return {0: directory / "config.yaml"} | {int(n): p for n, p in numbers.items() if n.isdigit()}


def _optimizer(module: Any) -> Table:
    """Its settings show only when it is made: here of one number."""
    make = getattr(module, "optimizer", None)
    if not callable(make):
        return {}
    optimizer = make([{"params": [nn.Parameter(torch.zeros(1))]}])
    table: Table = {"model.optimizer": type(optimizer).__name__}
    settings = {name: _plain(value) for name, value in optimizer.defaults.items()}
    table |= {f"model.optimizer.{name}": value for name, value in settings.items()}
    if module.lr_scheduler is not None:
        scheduler = module.lr_scheduler(optimizer)
        table["model.lr_scheduler"] = type(scheduler).__name__
        for name, value in vars(scheduler).items():
            if isinstance(value, bool | int | float | str) and name != "last_epoch":
                table |= {} if name.startswith("_") else {f"model.lr_scheduler.{name}": value}
    return {key: value for key, value in table.items() if value is not _UNKNOWN}


def _described(value: Any, depth: int = 0) -> Any:
    if (plain := _plain(value)) is not _UNKNOWN or depth > _DEPTH:
        return plain
    if isinstance(value, list | tuple):
        items = [_described(item, depth + 1) for item in value[:100]]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if isinstance(value, Mapping):
        return _UNKNOWN
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return _UNKNOWN
    names = [p for c in type(value).__mro__ if "__init__" in vars(c) for p in _parameters(c)]
    held = {name: _held(value, name) for name in names if name not in ("optimizer", "lr_scheduler")}
    arguments = {n: _described(v, depth + 1) for n, v in held.items() if v is not _UNKNOWN}
    return {
        "class_path": f"{type(value).__module__}.{type(value).__qualname__}",
        "init_args": arguments,
    }


def _parameters(cls: type) -> list[str]:
    return list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]


def _held(owner: Any, name: str) -> Any:
    """What a constructor's argument is kept as."""
    holders = (vars(owner), vars(vars(owner).get("objective", object)))
    for holder in holders:
        for kept in (f"_{name}", name):
            if kept in holder:
                value = holder[kept]
                return value[0] if kept != name and isinstance(value, tuple) else value
    return _UNKNOWN


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (int, float, str):  # an enum's member, say, which no checkpoint may hold
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple) and all(_plain(item) is not _UNKNOWN for item in value):
        return [_plain(item) for item in value]
    return _UNKNOWN


def _class_name(path: str) -> str:
    return path.rpartition(".")[2] if path.startswith(("lightning_rl.", "lightning.")) else path


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
