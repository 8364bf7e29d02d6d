"""Configurations as trees: files and options merged in order, each key with its place.

Also as flat tables of the keys that a run was configured with, and how two such tables differ.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightning_rl.config.yaml_text import parse_yaml, parse_yaml_nodes
from lightning_rl.errors import ConfigError, kind_of_path

Key = tuple[str | int, ...]
SPEC = ("class_path", "init_args", "dict_kwargs")
INHERITED = "inherited_init_args"  # those of a class that a later source replaced by another


def name_of(key: Key) -> str:
    """``trainer.callbacks[1].init_args.path``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in key).lstrip(".")


class Sources:
    """The merged ``tree``, and ``place(key)``: ``grpo.yaml:14``, or the option that set it."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self._places: dict[Key, str] = {}

    def place(self, key: Key) -> str:
        """Return the place where ``key`` was set, or its closest ancestor."""
        while key and key not in self._places:
            key = key[:-1]
        return self._places.get(key, "")

    def add_file(self, path: str) -> None:
        """Merge a YAML file; its keys override earlier ones."""
        tree, lines = load_yaml(path)
        if tree is None:
            raise ConfigError(
                f"--config {path}: the file is empty; write keys into it, or leave it out"
            )
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected keys (model, data, trainer), got {tree!r:.60}")
        self.tree = _merge(self.tree, tree)
        self._places |= {key: f"{path}:{line}" for key, line in lines.items()}

    def add_option(self, option: str, text: str) -> None:
        """Set a key, ``--data.group_size 16``, or append to a list, ``--trainer.callbacks+=X``."""
        name, append = option.removeprefix("--").removesuffix("+"), option.endswith("+")
        value = _parse_value(text, option)
        node: Any = self.tree
        key: Key = ()
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if isinstance(node, list):  # options after --trainer.callbacks+=X are about X
                key, node = (*key, len(node) - 1), node[-1]
            if "class_path" in node and part not in SPEC:
                key, node = (*key, "init_args"), node.setdefault("init_args", {})
            key = (*key, part)
            if depth == len(parts) - 1:
                break
            child = node.get(part)
            if isinstance(child, str):  # --model PolicyModule --model.compile true
                child = node[part] = {"class_path": child}
            if isinstance(child, list) and child and isinstance(child[-1], str):
                child[-1] = {"class_path": child[-1]}
            if not isinstance(child, dict) and not (isinstance(child, list) and child):
                child = node[part] = {}
            node = child
        if append:
            old = node.get(part) or []
            items = value if isinstance(value, list) else [value]
            node[part] = [*(old if isinstance(old, list) else [old]), *items]
            key = (*key, len(node[part]) - 1)
        else:
            node[part] = _merge(node.get(part), value)
        self._places = {k: p for k, p in self._places.items() if k[: len(key)] != key}
        self._places[key] = f"option {option}"


def read_sources(arguments: Sequence[str]) -> Sources:
    """Merge the options of a command line (without its command), in order.

    Raises:
        ConfigError: for a missing or invalid YAML file, or an argument that is not an option.
    """
    sources = Sources()
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        option, equals, value = token.partition("=")
        if not option.startswith("-"):
            raise ConfigError(
                f"{token!r} is not an option; write --key value (--data.group_size 16)"
            )
        if option.startswith("--print_config"):
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{option} needs a value")
            value = rest.pop(0)
        if option in ("-c", "--config"):
            sources.add_file(value)
        elif option.startswith("--"):
            sources.add_option(option, value)
        else:
            raise ConfigError(f"no such option {option!r}; options start with -- (or are -c, -h)")
    return sources


def load_yaml(path: str) -> tuple[Any, dict[Key, int]]:
    """Return the content of a YAML file, and the line of every key and list item."""
    kind = kind_of_path(Path(path))
    if kind is not None:
        raise ConfigError(f"--config {path}: is {kind}, not a file; give the path of a file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"--config {path}: there is no such file (working directory: {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    lines: dict[Key, int] = {}
    root, values = parse_yaml_nodes(text, path)
    _record_lines(root, (), lines, path)
    return values, lines


def _record_lines(node: yaml.Node | None, key: Key, lines: dict[Key, int], path: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*key, index] = item.start_mark.line + 1
            _record_lines(item, (*key, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for name, item in node.value:
            line, inner = name.start_mark.line + 1, (*key, name.value)
            if inner in lines:  # YAML itself would silently keep the last
                raise ConfigError(
                    f"{path}:{line}: {name_of(inner)} is set twice (also in line {lines[inner]}); "
                    "remove one"
                )
            lines[inner] = line
            _record_lines(item, inner, lines, path)


def _parse_value(text: str, option: str) -> Any:
    """Parse a command-line value as YAML if that gives a structure, number etc., else keep the
    text.
    """
    try:
        value = parse_yaml(text, f"option {option}")
    except ConfigError as error:
        if error.__cause__ is None:  # it is YAML, but without bounds: the parser would hang
            raise
        return text
    return text if isinstance(value, str) else value


def _merge(old: Any, new: Any) -> Any:
    """Merge mappings recursively; anything else, including lists, is replaced."""
    if isinstance(old, dict) and isinstance(new, str) and "class_path" in old:
        new = {"class_path": new}  # --data.engine TransformersEngine
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    merged = dict(old)
    if {"class_path"} <= old.keys() & new.keys() and old["class_path"] != new["class_path"]:
        # Arguments that the new class does not have are dropped, the others stay.
        merged[INHERITED] = old.get(INHERITED, {}) | (merged.pop("init_args", None) or {})
    for name, value in new.items():
        merged[name] = _merge(merged.get(name), value)
    return merged


# ---------------------------------------------------------------- the table of a run

Table = dict[str, Any]
_UNKNOWN = object()
_DEPTH = 5


class Change(NamedTuple):
    """A key whose value has changed."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.then)} then, {_short(self.now)} now"


def flatten(tree: Any, key: str = "") -> Table:
    """Flatten to command-line keys: ``{"model.loss": "PPOClip", "model.lr": 1e-3}``.

    A class is the value of its key, and its arguments are below that key; callbacks are keyed by
    class name.
    """
    if isinstance(tree, Mapping) and "class_path" in tree:
        arguments = (tree.get("init_args") or {}) | (tree.get("dict_kwargs") or {})
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


def differences(then: Table, now: Table, shared: bool = False) -> list[Change]:
    """Return keys whose values differ, without those below such a key.

    Values with the same text are equal: Lightning keeps ``--trainer.devices 1`` as text, but
    ``devices: 1`` of a file as a number.

    Args:
        then: a table.
        now: another.
        shared: leave out keys that only one of them has, but for callbacks.
    """
    changes: list[Change] = []
    for key in dict.fromkeys([*then, *now]):
        old, new = _value(then, key), _value(now, key)
        callback = key.startswith("trainer.callbacks.") and key.count(".") == 2
        same = old == new or str(old) == str(new)
        if same or (shared and _UNKNOWN in (old, new) and not callback):
            continue
        if not any(key.startswith(f"{change.key}.") for change in changes):
            values = (None if value is _UNKNOWN else value for value in (old, new))
            changes.append(Change(key, *values))
    return changes


def with_defaults(then: Table, now: Table) -> Table:
    """Return ``then`` with the defaults of arguments that only ``now`` has, of a later release."""
    found = {key: _default_of(key, now) for key in now.keys() - then.keys()}
    return {key: value for key, value in found.items() if value is not _UNKNOWN} | then


def _default_of(key: str, table: Table) -> Any:
    owner, _, name = key.rpartition(".")
    given = _argument(owner, name, table)
    if given is None or given.default is inspect.Parameter.empty:
        return _UNKNOWN
    return flatten(_described(given.default), key).get(key, _UNKNOWN)


def _argument(owner: str, name: str, table: Table) -> Any:
    """Return what the class, or class of settings, at a key tells of an argument; or None."""
    from lightning_rl.config.hints import classes, import_object, parameters
    from lightning_rl.config.names import MODULE_OF, public

    kinds: list[type] = []
    if isinstance(named := table.get(owner), str):
        with suppress(ConfigError):  # a class that only its own script can import
            kinds = [public(named) if named in MODULE_OF else import_object(named)]
    elif owner and (given := _argument(*owner.rpartition(".")[::2], table)) is not None:
        kinds = classes(given.annotation)
    return parameters(kinds[0]).get(name) if kinds else None


def _value(table: Table, key: str) -> Any:
    """Look a key up; if it only has keys below it, as arguments without a class, return those."""
    if key in table:
        return table[key]
    below = {n.removeprefix(f"{key}."): v for n, v in table.items() if n.startswith(f"{key}.")}
    return below or _UNKNOWN


def described(module: Any, data: Any, trainer: Any) -> Table:
    """Return the table of a run that a script assembled, as far as its objects reveal it."""
    tree = {"model": _described(module), "data": _described(data)}
    table = flatten(tree) | {"trainer.precision": str(trainer.precision)}
    for name, policy in getattr(module, "policies", {"": module}).items():
        key = f"model.policies.{name}" if name else "model"
        table |= flatten(_described(policy), key) | _optimizer(policy, key)
    return {key: value for key, value in table.items() if value is not _UNKNOWN}


def config_files(directory: Path) -> dict[int, Path]:
    """Return a run's configurations by the iteration from which each holds; config.yaml's is 0."""
    later = directory.glob("config_*.yaml")
    numbers = {p.stem.removeprefix("config_"): p for p in later}
    return {0: directory / "config.yaml"} | {int(n): p for n, p in numbers.items() if n.isdecimal()}


def _optimizer(module: Any, place: str) -> Table:
    """Return an optimizer's settings, which are visible only once it is made, here with one
    parameter.
    """
    make = getattr(module, "optimizer", None)
    if not callable(make):
        return {}
    import torch  # here, and below, since the viewer reads tables without it

    optimizer = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    table: Table = {f"{place}.optimizer": type(optimizer).__name__}
    settings = {name: _plain(value) for name, value in optimizer.defaults.items()}
    table |= {f"{place}.optimizer.{name}": value for name, value in settings.items()}
    make_scheduler = getattr(module, "lr_scheduler", None)
    if make_scheduler is not None:
        scheduler = make_scheduler(optimizer)
        table[f"{place}.lr_scheduler"] = type(scheduler).__name__
        for name, value in getattr(scheduler, "__dict__", {}).items():
            if isinstance(value, bool | int | float | str) and name != "last_epoch":
                table |= {} if name.startswith("_") else {f"{place}.lr_scheduler.{name}": value}
    return table


def _described(value: Any, depth: int = 0) -> Any:
    if (plain := _plain(value)) is not _UNKNOWN or depth > _DEPTH:
        return plain
    if isinstance(value, list | tuple):
        items = [_described(item, depth + 1) for item in value[:100]]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if isinstance(value, Mapping):
        inner = {name: _described(one, depth + 1) for name, one in value.items()}
        plain = all(isinstance(name, str) for name in inner) and _UNKNOWN not in inner.values()
        return inner if plain else _UNKNOWN
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    import torch

    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return _UNKNOWN
    inits = [vars(c)["__init__"] for c in type(value).__mro__ if "__init__" in vars(c)]
    parameters = [p for i in inits for p in list(inspect.signature(i).parameters.values())[1:]]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    held = {name: _held(value, name) for name in names if name not in ("optimizer", "lr_scheduler")}
    arguments = {n: _described(v, depth + 1) for n, v in held.items() if v is not _UNKNOWN}
    return {
        "class_path": f"{type(value).__module__}.{type(value).__qualname__}",
        "init_args": arguments,
    }


def _held(owner: Any, name: str) -> Any:
    """Find the attribute in which an object keeps a constructor argument."""
    parts = (vars(owner).get(part) for part in ("objective", "settings"))
    holders = (vars(owner), *(getattr(part, "__dict__", {}) for part in parts))
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
