"""``lightning-rl quickstart``: a first training run, in the working directory."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_rl.cli.process import CommandParser
from lightning_rl.config.names import LIBRARY
from lightning_rl.errors import DiskError

COPIED = {".py", ".yaml", ".md"}
"""Suffixes of a recipe's files; Python leaves other files beside them."""
OUT = Path("runs/smollm2")
_RECIPE = "recipes.smollm2.quickstart"


def copy_recipes(place: Path) -> list[Path]:
    """Copy missing recipes to ``place/recipes``, to read and to change; returns the files copied.

    Existing files stay as they are, and a checkout is not changed.

    Raises:
        DiskError: if they cannot be written there.
    """
    installed, checkout = LIBRARY / "recipes", LIBRARY.parent / "recipes"
    shipped = installed if installed.is_dir() else checkout
    missing = []
    try:
        for source in sorted(shipped.rglob("*")):
            copy = place / "recipes" / source.relative_to(shipped)
            if source.suffix not in COPIED or copy.exists():
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f"{copy.name}.partial")
            shutil.copyfile(source, partial)
            partial.replace(copy)  # so that a file that exists is whole
            missing.append(copy)
    except OSError as error:
        raise DiskError(
            f"the recipes cannot be written to {place / 'recipes'}: {error}; run this in a folder "
            "where you have write permission"
        ) from error
    return missing


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command, which its recipe takes.

    Raises:
        ConfigError: naming an option that it does not have, or a wrong value.
    """
    parser = CommandParser(
        "quickstart",
        "Train a real model of 135 million parameters: it learns arithmetic on this machine.",
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"its folder; default: {OUT}")
    parser.add_argument("--model", help="another chat model: a directory or a hub name")
    parser.add_argument("--iterations", type=int, help="default: 16")
    parser.add_argument("--seed", type=int, help="default: 0")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Copy the recipes if there are none, then run ``recipes/smollm2``."""
    parse_arguments(arguments)  # help and mistakes, before anything is written
    here = Path.cwd()
    if copied := copy_recipes(here):
        print(f"wrote {len(copied)} files to {here / 'recipes'}: recipes to read and to change")
    sys.path.insert(0, str(here))
    return int(import_module(_RECIPE).main(arguments))
