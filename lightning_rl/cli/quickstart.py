"""``lightning-rl quickstart``: the first training, where the user stands."""

import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_rl.errors import DiskError

_LIBRARY = Path(__file__).parents[1]
COPIED = {".py", ".yaml", ".md"}
"""Kinds of files that recipes are of; Python leaves others beside them."""
_RECIPE = "recipes.smollm2.quickstart"


def copy_recipes(place: Path) -> list[Path]:
    """Have all recipes in ``place/recipes``, to read and to change; returns what was missing.

    What is there already stays as it is, and so does all in a checkout.

    Raises:
        DiskError: if they cannot be written there.
    """
    installed, checkout = _LIBRARY / "recipes", _LIBRARY.parent / "recipes"
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
            "that you may write to"
        ) from error
    return missing


def main(arguments: Sequence[str]) -> int:
    """Run ``recipes/smollm2``, and copy the recipes first where there are none."""
    here = Path.cwd()
    if copied := copy_recipes(here):
        print(f"wrote {len(copied)} files to {here / 'recipes'}: recipes to read and to change")
    sys.path.insert(0, str(here))
    return int(import_module(_RECIPE).main(arguments))
