"""List what a wheel must hold, by what lies on the disk."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


PACKAGE_FOLDERS = {"lightning_rl": "lightning_rl", "lightning_rl.callbacks": "callbacks"}


def modules_on_disk() -> set[str]:
    """Return every module as a wheel must hold it; callbacks/ under its installed name."""
    found = set()
    for package, folder in PACKAGE_FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):  # rglob does not follow the symlink
            relative = path.relative_to(ROOT / folder)
            found.add(f"{package.replace('.', '/')}/{relative.as_posix()}")
    return found


def data_on_disk() -> set[str]:
    """Return every file beside the modules, as a wheel must hold it."""
    left_out = (".py", ".pyc")
    folders = (ROOT / "lightning_rl", ROOT / "lightning_rl" / "callbacks")  # which is a symlink
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in left_out}


def recipes_on_disk() -> set[str]:
    """Return every file of recipes/ but what Python leaves there."""
    files = (path for path in (ROOT / "recipes").rglob("*") if path.is_file())
    return {p.relative_to(ROOT).as_posix() for p in files if "__pycache__" not in p.parts}
