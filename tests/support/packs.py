"""Provide copies of packs in which something was changed."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from lightning_rl.cli.pack.archive import extract_archive, write_archive


def changed(step: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """Return a copy of a pack in which some members were changed."""
    extract_archive(step, folder / "parts")
    change(folder / "parts")
    write_archive(folder / "parts", folder / "changed.zip")
    return folder / "changed.zip"


def with_number(
    step: Path, folder: Path, member: str, name: str, place: int, number: float
) -> Path:
    """Return a copy of a pack in which a tensor has another number at a flat index."""

    def change(parts: Path) -> None:
        file = parts / f"{member}.safetensors"
        tensors = load_file(file)
        tensors[name].view(-1)[place] = number
        save_file(tensors, file)

    return changed(step, folder, change)
