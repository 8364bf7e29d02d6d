"""A conversion as YAML, with what is to be said about it as comments above."""

import json
import textwrap
from collections.abc import Iterable

import yaml  # type: ignore[import-untyped]

from lightning_rl.cli.convert.rows import Conversion

_ORDER = ("seed_everything", "model", "data", "trainer")


def as_yaml(conversion: Conversion, source: str) -> str:
    """What ``lightning-rl fit --config`` reads; ``source`` is named in the first line."""
    lines = [f"Converted from {_one_line(source)} by lightning-rl convert.", *notes(conversion)]
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    ordered = {name: conversion.config[name] for name in _ORDER if name in conversion.config}
    text = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=98)
    return f"{comments}\n{text}"


def notes(conversion: Conversion) -> list[str]:
    """What to fill in, what was left behind, and what carries over as something else."""
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
    """Nothing of a file may end a comment."""
    short = "".join(c if c.isprintable() else " " for c in text)
    return short if len(short) <= 200 else f"{short[:197]}..."
