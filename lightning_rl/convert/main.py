"""``lightning-rl convert``: convert another library's configuration to ours."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_rl.cli.process import CommandParser
from lightning_rl.config.yaml_text import dump_yaml
from lightning_rl.convert.conversion import Conversion
from lightning_rl.convert.hydra import flat, parse_overrides
from lightning_rl.convert.prime_rl import convert_prime_rl
from lightning_rl.convert.shell import Word
from lightning_rl.convert.sources import Source, from_command, read
from lightning_rl.convert.trainers_trl import require_known, trainer_of_options
from lightning_rl.convert.trl import convert_trl
from lightning_rl.convert.verl import convert_verl
from lightning_rl.errors import ConfigError, DiskError, require_at_least

_ORDER = ("seed_everything", "model", "data", "trainer")
_ADDED = {
    "trl": {"model_name_or_path": "model", "dataset_name": "prompts", "reward_funcs": "rewards"},
    "verl": {
        "actor_rollout_ref.model.path": "model",
        "data.train_files": "prompts",
        "data.val_files": "eval_prompts",
        "trainer.n_gpus_per_node": "devices",
    },
    "prime-rl": {"model.name": "model", "deployment.num_train_gpus": "devices"},
}
"""Their names for what options of the command line set."""


def as_yaml(conversion: Conversion, source: str) -> str:
    """Return the YAML for ``lightning-rl fit --config``; its first line names ``source``."""
    lines = [f"Converted from {_one_line(source)} by lightning-rl convert.", *notes(conversion)]
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    ordered = {name: conversion.config[name] for name in _ORDER if name in conversion.config}
    text = dump_yaml(ordered, default_flow_style=None, width=98)
    return f"{comments}\n{text}"


def notes(conversion: Conversion) -> list[str]:
    """List what to fill in, what was left behind, and what carries over as something else."""
    left = (
        f"{item.key}={_one_line(json.dumps(item.value, default=str))}: {item.reason}"
        for item in conversion.left
    )
    parts = (
        ("To fill in:", conversion.missing),
        ("Not carried over, or not as it is:", left),
        ("Carried over as something else:", conversion.remarks),
    )
    return [line for title, items in parts for line in _listed(title, items)]


def _listed(title: str, items: Iterable[str]) -> list[str]:
    lines = [
        line
        for item in items
        for line in textwrap.wrap(
            item,
            width=96,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
    return [title, *lines] if lines else []


def _one_line(text: str) -> str:
    """Replace unprintable characters, so that no text of a file can end a comment; cut if long."""
    short = "".join(c if c.isprintable() else " " for c in text)
    return short if len(short) <= 200 else f"{short[:197]}..."


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: for options that cannot be combined.
    """
    parser = CommandParser(
        "convert",
        "Read a configuration of TRL (GRPOConfig, SFTConfig, ...), verl (PPO trainer) or "
        "prime-rl (rl.toml) and write ours. What could not be carried over, and what a number "
        "means here, is listed above it and on stderr.",
        "In a Python script, the arguments of a trainer, its config, LoraConfig and load_dataset "
        "are read; values that only a run would reveal are named. For verl, prefer the script "
        "that starts it, or .hydra/overrides.yaml, which hold only what was set. A Python script "
        "is read, never run; Bash evaluates a shell script in a sandbox that has no programs. "
        "Instead of a file: lightning-rl convert -- COMMAND, where the command starts a trainer.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="YAML, JSON, TOML, the Python script, or the shell script that starts it",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="values that count more than the file's, as verl takes them: name=value, +name=value, "
        "++name=value, ~name",
    )
    parser.add_argument(
        "--from",
        dest="library",
        choices=("trl", "verl", "prime-rl"),
        help="whose it is (default: guessed from its names)",
    )
    parser.add_argument(
        "--trainer", help="TRL's trainer: grpo, sft, dpo, ... (default: guessed likewise)"
    )
    parser.add_argument("--output", type=Path, help="the file to write (default: print it)")
    parser.add_argument(
        "--devices", type=int, help="training processes (default: what theirs says, or 1)"
    )
    parser.add_argument(
        "--model", help="directory or hub name, which TRL's configurations do not contain"
    )
    parser.add_argument("--prompts", help="file or folder of prompts to train on")
    parser.add_argument("--eval_prompts", help="file or folder of held-out prompts")
    parser.add_argument("--rewards", nargs="+", help="import paths of reward functions")
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    parsed = parser.parse_intermixed_args(arguments[:end])
    parsed.command = [Word(word) for word in command]
    require_at_least(1, devices=parsed.devices)
    if (parsed.file is None) == (not command):
        parser.error("it takes a file, or -- and a command that starts a trainer")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Write the YAML, and the notes about it to stderr."""
    options = parse_arguments(arguments)
    if options.file is None:
        source, name = from_command(options.command, Path()), "a command"
    else:
        source, name = read(options.file), options.file.name
    conversion = convert(source, options, name)
    text = as_yaml(conversion, name)
    if options.output is None:
        print(text, end="")
    else:
        try:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DiskError(f"{options.output} cannot be written: {error}") from error
    print("\n".join(notes(conversion)), file=sys.stderr)
    return 0


def convert(source: Source, options: argparse.Namespace, name: str) -> Conversion:
    """Convert what was read from ``name``; settings of the command line take precedence.

    Raises:
        ConfigError: if it belongs to the other library than ``--from`` says, or an option cannot
            be used with it.
    """
    if options.library not in (None, source.library or options.library):
        raise ConfigError(f"--from {options.library}: {name} is for {source.library}")
    library = source.library or options.library or "trl"
    added = parse_overrides(options.overrides)
    said = {theirs: getattr(options, option) for theirs, option in _ADDED[library].items()}
    added |= {name: value for name, value in said.items() if value is not None}
    if library == "prime-rl":
        if options.prompts or options.eval_prompts or options.rewards:
            raise ConfigError(
                "--prompts, --eval_prompts and --rewards: those of prime-rl are its environments'; "
                "change them in what convert writes"
            )
        conversion = convert_prime_rl(source.values, added)
    elif library == "verl":
        values = parse_overrides(options.overrides, flat(source.values))
        conversion = convert_verl(values | added, options.rewards)
    else:
        require_known(source.values)  # before anything is added to it
        called = "grpo" if options.rewards else Path(name).stem
        trainer = options.trainer or source.trainer
        trainer = trainer or trainer_of_options(source.values | added, called)
        devices = options.devices or source.devices or 1
        conversion = convert_trl(source.values | added, devices, options.eval_prompts, trainer)
    doubts = {n: doubts for n, doubts in source.doubts.items() if n not in added}
    unread = (doubt for doubts_of_one in doubts.values() for doubt in doubts_of_one)
    conversion.missing += dict.fromkeys([*unread, *source.missing])
    conversion.remarks += source.remarks
    return conversion
