"""What the user wrote: configuration files and options merged in order, each key with its place."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_rl.errors import ConfigError

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
        """Where ``key`` was written, or the closest key above it."""
        while key and key not in self._places:
            key = key[:-1]
        return self._places.get(key, "")

    def add_file(self, path: str) -> None:
        """Merge a YAML file; its keys win over those before."""
        tree, lines = load_yaml(path)
        if tree is None:
            return
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected keys (model, data, trainer), got {tree!r:.60}")
        self.tree = _merge(self.tree, tree)
        self._places |= {key: f"{path}:{line}" for key, line in lines.items()}

    def add_option(self, option: str, text: str) -> None:
        """Set one key: ``--data.group_size 16``; append to a list: ``--trainer.callbacks+=X``."""
        name, append = option.removeprefix("--").removesuffix("+"), option.endswith("+")
        value = _parse_value(text)
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
            if isinstance(child, str):  # --model PolicyModule --model.seed 1
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
    """Merge what a command line (without its command) says, in its order.

    Raises:
        ConfigError: for a file that is missing or no YAML, or an argument that is no option.
    """
    sources = Sources()
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        option, equals, value = token.partition("=")
        if not option.startswith("-"):
            raise ConfigError(f"{token!r} is no option; write --key value (--data.group_size 16)")
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
    """The content of a YAML file, and the line of every key and list item."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"--config {path}: there is no such file (working directory: {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    lines: dict[Key, int] = {}
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        _record_lines(root, (), lines, path)
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


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


def _parse_value(text: str) -> Any:
    """A command-line value: YAML where that is a structure, number or the like, else the text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, str) else value


def _merge(old: Any, new: Any) -> Any:
    """Deep merge of mappings; anything else, lists too, is replaced."""
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
