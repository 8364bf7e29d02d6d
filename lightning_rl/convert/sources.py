"""Sources of a conversion: a file of values, Hydra overrides, or a script that starts a run."""

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.config.yaml_text import DEEPEST, parse_yaml
from lightning_rl.convert.hydra import flat, parse_overrides
from lightning_rl.convert.python_trl import read_trl_script
from lightning_rl.convert.shell import INSTEAD, SUFFIXES, Word, run_script
from lightning_rl.convert.trainers_trl import trainer_of
from lightning_rl.errors import ConfigError

VERL_SECTIONS = {"actor_rollout_ref", "algorithm", "critic"}
"""Top-level names of verl's configuration that no GRPOConfig has."""
_LARGEST = 10_000_000
_VERL_PROGRAM = re.compile(r"-m (\w+\.)*main_(ppo|dapo)\w*|\S+ (\S*/)?main_(ppo|dapo)\w*\.py")
_TRL_PROGRAM = re.compile(
    r"trl (grpo|rloo|distillation|sft|dpo|kto|reward)"
    r"|\S+ (\S*/)?((grpo|rloo|distillation|gkd|gold|sft|dpo|kto)\w*|reward(_model\w*)?)\.py"
)
_PROCESSES = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node)[ =](\d{1,4})\b")


@dataclass
class Source:
    """Values by name, the library they belong to, and what could not be read.

    Args:
        values: values by name.
        library: ``trl``, ``verl`` or ``prime-rl``; None: a file of values that may belong to any.
        missing: settings to fill in.
        remarks: values that were read as something else.
        doubts: by name, what only a run would tell about its value.
        devices: number of training processes given to a launcher.
        trainer: TRL's trainer, as :func:`.trainer_of` names it; None: its options tell.
    """

    values: dict[str, Any]
    library: str | None = None
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    devices: int | None = None
    trainer: str | None = None


def read(path: Path) -> Source:
    """Read a file of one of the kinds that convert accepts.

    Raises:
        ConfigError: if it is of another kind, or damaged.
    """
    if path.suffix not in (".yaml", ".yml", ".json", ".toml", ".py", *SUFFIXES):
        raise ConfigError(
            f"{path}: convert reads .yaml, .yml, .json, .toml, .py and shell scripts "
            f"({', '.join(SUFFIXES)}); to convert training_args.bin, write "
            "it with json.dump(config.to_dict(), file) first"
        )
    text = _text(path)
    if path.suffix == ".py":
        script = read_trl_script(text, str(path))
        return Source(script.values, "trl", script.missing, trainer=script.trainer)
    if path.suffix in SUFFIXES:
        return _from_script(path)
    if path.suffix in (".json", ".toml"):
        values = _loaded(json.loads if path.suffix == ".json" else tomllib.loads, text, path)
    else:
        values = parse_yaml(text, str(path))
    if isinstance(values, list) and all(isinstance(value, str) for value in values) and values:
        return Source(parse_overrides(values), "verl")
    if not isinstance(values, dict) or not values:
        what = type(values).__name__ if values else "nothing"
        raise ConfigError(f"{path} holds {what}, not names and values")
    nameless = next((name for name in values if not isinstance(name, str)), None)
    if nameless is not None:
        raise ConfigError(f"{path}: {nameless!r} is not a parameter name")
    if path.suffix == ".toml":
        return Source(values, "prime-rl")
    verl = VERL_SECTIONS & {name.partition(".")[0] for name in values}
    return Source(flat(values), "verl") if verl else Source(values)


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")
        if path.stat().st_size > _LARGEST:
            raise ConfigError(
                f"{path}: more than {_LARGEST:,} bytes; no configuration is that large"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _loaded(load: Callable[[str], Any], text: str, path: Path) -> Any:
    try:
        values = load(text)
        deep = _depth(values) > DEEPEST
    except ValueError as error:  # broken, or a number of thousands of digits
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        deep = True
    if deep:
        raise ConfigError(f"{path}: more than {DEEPEST} levels deep; no configuration is that deep")
    return values


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _from_script(path: Path) -> Source:
    """Read the first command of a script that starts verl's or TRL's trainer.

    Raises:
        ConfigError: if there is none.
    """
    script = run_script(path, _program)
    if not script.commands:
        parts = {
            "these are not set:": [f"${name}" for name in script.unset],
            "these did not run:": script.others,
        }
        parts_text = [f"{title} {', '.join(names)}" for title, names in parts.items() if names]
        messages = "; ".join(f"{text:.200}" for text in (*script.messages, *parts_text))
        raise ConfigError(
            f"{path}: no command in it starts verl (python3 -m verl.trainer.main_ppo ...) or TRL "
            f"(trl grpo ...){f' ({messages})' if messages else ''}; {INSTEAD}"
        )
    source = from_command(script.commands[0], path.parent)
    if len(script.commands) > 1:
        source.missing.append(
            f"{len(script.commands)} commands start a trainer: the first is converted; keep the "
            "one you mean"
        )
    source.missing += [f"{path.name}: {message}" for message in script.messages]
    if script.others:
        names = ", ".join(script.others)
        source.remarks.append(f"commands that did not run, and count as successful: {names:.400}")
    return source


def from_command(words: Sequence[Word], folder: Path) -> Source:
    """Read the words of a command that starts verl's or TRL's trainer.

    Raises:
        ConfigError: if it starts neither.
    """
    found = _program(words)
    if found is None:
        raise ConfigError(
            f"{' '.join(words)[:80]!r} starts neither verl (python3 -m verl.trainer.main_ppo ...) "
            "nor TRL (trl grpo ...)"
        )
    read_words, at = found
    source = read_words(words[at:], folder)
    if source.library == "trl":
        source.trainer = trainer_of(Path(words[at - 1]).name)
    source.devices = _processes(words[: at - 1]) or source.devices
    return source


def _program(words: Sequence[str]) -> tuple[Callable[..., Source], int] | None:
    """Return what reads the options of the trainer that a command starts, and where they begin."""
    for program, read_words in ((_VERL_PROGRAM, _overrides), (_TRL_PROGRAM, _flags)):
        for at, pair in enumerate(itertools.pairwise(words)):  # two words give a program away
            if program.fullmatch(" ".join(pair)):
                return read_words, at + 2
    return None


def _processes(words: Sequence[str]) -> int | None:
    """Return the number of processes given to a launcher: ``--num_processes 4``,
    ``--nproc_per_node=4``.
    """
    processes = _PROCESSES.search(" ".join(words))
    return int(processes[1]) if processes else None


def _overrides(words: Sequence[Word], folder: Path) -> Source:
    lines: list[Word] = []
    options: list[str] = []
    source = Source({}, "verl")
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-"):
            options.append(word)
        elif before.startswith("-") and "=" not in before + word:  # --config-name dapo
            options[-1] += f" {word}"
        elif word and not word.startswith("$"):
            lines.append(word)
            source.doubts[word.partition("=")[0].lstrip("+~")] = word.doubts
            continue
        source.missing += word.doubts
    source.values = parse_overrides(lines)
    source.missing += [f"{option}: the settings of the file that it names" for option in options]
    return source


def _flags(words: Sequence[Word], folder: Path) -> Source:
    """Read ``--name value``; a name alone is true, several values are a list."""
    given: dict[str, list[str]] = {}
    source = Source({}, "trl")
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
        elif name and word:
            given[name].append(word)
        source.doubts[name] = (*source.doubts.get(name, ()), *word.doubts)
    for name, found in given.items():
        source.values[name] = True if not found else found[0] if len(found) == 1 else found
    source.devices = _processes([f"--num_processes={source.values.pop('num_processes', '')}"])
    if (named := source.values.pop("config", None)) is not None:
        path = folder / str(named)
        if path.suffix in (".yaml", ".yml") and path.is_file():
            source.values = read(path).values | source.values
        else:
            source.missing.append(f"--config {named}: the settings of that file")
    return source
